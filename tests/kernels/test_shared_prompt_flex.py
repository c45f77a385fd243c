"""FlexAttention's masks, and the results of its own definition with them: the compiled one trains on CUDA alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

from megatron_rl.ops.shared_prompt.backends import flex
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.drawn_layouts import layouts
from tests.kernels.shared_prompt_cases import BRANCHED, RAGGED, Case, errors

CPU = torch.device("cpu")
WINDOWS = st.none() | st.integers(1, 200)


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_flex_attention", lambda: flex_attention.flex_attention)
    # torch refuses gradients on the CPU since its compiled kernels have none there; its definition has them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@settings(max_examples=60)
@given(layout=layouts(longest=150), window=WINDOWS)
def test_blocks_that_see_each_other_are_listed_and_whole_ones_see_everything(
    layout: Layout, window: int | None
) -> None:
    if layout.num_tokens == 0:
        return
    visible = layout.visible(window)
    mask = flex.build_block_mask(layout, CPU, window)
    tokens = torch.arange(layout.num_tokens)
    assert mask.mask_mod(0, 0, tokens[:, None], tokens[None, :]).numpy().tolist() == visible.tolist()
    some = _listed(mask.kv_num_blocks, mask.kv_indices, layout.num_tokens)
    whole = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, layout.num_tokens)
    assert not (some & whole).any()
    assert visible[whole].all()
    assert (some | whole)[visible].all()


def test_a_groups_responses_do_not_look_at_each_others_blocks() -> None:
    layout = Layout.of_groups([(256, [256, 256, 256])])
    mask = flex.build_block_mask(layout, CPU, None)
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 8
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2, 3, 2, 3, 2, 3]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("layout", [RAGGED, BRANCHED, Layout((0,), (-1,))], ids=["ragged", "branched", "empty"])
def test_uncompiled_flex_attention_equals_the_definition(layout: Layout, window: int | None) -> None:
    case = Case.draw(layout, (4, 2), 16, window=window, has_sinks=window is not None)
    assert max(errors(case.run(flex.attention), case.exact()).values()) <= 1e-12


def _listed(num_blocks: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> np.ndarray:
    """Return, for each query and key, whether their blocks are listed."""
    size = blocks.shape[-1]
    listed_BB = np.zeros((size, size), dtype=bool)
    for row, (number, columns) in enumerate(zip(num_blocks[0, 0].tolist(), blocks[0, 0].tolist(), strict=True)):
        listed_BB[row, columns[:number]] = True
    return listed_BB.repeat(flex.BLOCK, 0).repeat(flex.BLOCK, 1)[:num_tokens, :num_tokens]
