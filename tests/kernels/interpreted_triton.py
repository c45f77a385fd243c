"""The kernels of the `triton` backend against the dense definition in float64, forward and all gradients.

test_interpreted.py runs this with TRITON_INTERPRET=1.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.backends import triton_fused
from megatron_rl.ops.shared_prompt.backends.triton_blocks import Blocks, KernelBlocks
from megatron_rl.ops.shared_prompt.backends.triton_tables import TileTables
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from tests.kernels.drawn_layouts import layouts
from tests.kernels.shared_prompt_cases import NAMES_WITH_SINKS, Case, errors
from tests.truth import error_over_bound

# Rows after the end of a short tile divide zero by zero. These results are never read.
pytestmark = [
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]

attention = BACKENDS["triton"].attention
# Small forms of the layouts of shared_prompt_cases, of more than a tile.
RAGGED = Layout.of_groups([(70, [33, 0, 64, 5]), (0, [40]), (19, [])])
BRANCHED = Layout((90, 9, 50, 21, 0, 12), (ROOT, 0, 1, 0, 3, 4))
SHORT_RAGGED = Layout.of_groups([(20, [33, 0, 5]), (0, [14])])
SHORT_BRANCHED = Layout((30, 9, 21, 0, 12), (ROOT, 0, 1, 0, 3))
HEADS = ((2, 2), (2, 1), (4, 2), (3, 1))
HEAD_DIMS = (64, 96, 128, 256)
SHAPES = list(zip(itertools.cycle((RAGGED, BRANCHED)), HEADS, HEAD_DIMS))
SHORT_SHAPES = list(zip(itertools.cycle((SHORT_RAGGED, SHORT_BRANCHED)), HEADS, HEAD_DIMS))
# Blocks that divide a tile in several ways, and reach over each other's ends.
SMALL = KernelBlocks(Blocks(8, 16, 4, 1), Blocks(16, 8, 4, 1), Blocks(16, 8, 4, 1))
# With more queries than keys, a window may hide all of a block's first keys from its last queries.
TALL = KernelBlocks(Blocks(16, 8, 4, 1), Blocks(16, 8, 4, 1), Blocks(8, 8, 4, 1))


@contextlib.contextmanager
def small_tiles(blocks: KernelBlocks = SMALL) -> Iterator[None]:
    small_tables = functools.partial(TileTables.of, tile=16, short_item=16)

    with (
        mock.patch.object(TileTables, "of", small_tables),
        mock.patch.object(triton_fused, "choose_blocks", return_value=blocks),
    ):
        yield


def assert_near(case: Case) -> None:
    """Check errors against fp32's rounding. If terms of a gradient cancel, the terms are rounded."""
    exact = case.exact()
    found = errors(case.run(attention), exact)
    for name, tensor in zip(NAMES_WITH_SINKS, exact, strict=False):
        largest = max(tensor.abs().max().item(), 1.0) if tensor.numel() else 1.0
        assert found[name] <= 2.4e-6 * largest, (name, found[name], largest)


@settings(max_examples=12)
@given(
    layout=layouts(longest=12),
    heads=st.sampled_from([(2, 2), (2, 1), (3, 1)]),
    dims=st.sampled_from([(8, 8), (16, 16), (24, 24), (24, 16), (16, 40)]),
)
def test_any_forest_is_attended_to_as_defined(layout: Layout, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    with small_tiles():
        assert_near(Case.draw(layout, heads, dims[0], torch.float32, value_dim=dims[1]))


@settings(max_examples=12)
@given(
    layout=layouts(longest=24),
    heads=st.sampled_from([(2, 2), (3, 1)]),
    window=st.none() | st.integers(1, 30),
    has_sinks=st.booleans(),
)
def test_a_window_hides_keys_and_a_sink_takes_its_share(
    layout: Layout, heads: tuple[int, int], window: int | None, has_sinks: bool
) -> None:
    with small_tiles():
        assert_near(Case.draw(layout, heads, 16, torch.float32, window=window, has_sinks=has_sinks))


@pytest.mark.parametrize("window", [1, 40, 130])
def test_a_window_ends_in_any_tile(window: int) -> None:
    Case.draw(
        SHORT_RAGGED if window < 40 else BRANCHED, (2, 1), 64, torch.bfloat16, window, has_sinks=True
    ).assert_near(attention)


@pytest.mark.parametrize("window", [1, 5, 12])
def test_a_window_may_be_smaller_than_blocks(window: int) -> None:
    with small_tiles(TALL):
        assert_near(Case.draw(Layout.of_groups([(40, [21, 0, 35])]), (2, 1), 16, torch.float32, window, has_sinks=True))


def test_parts_of_a_gradient_from_many_programs_are_summed() -> None:
    layout = Layout.of_groups([(40, [50, 0, 35])])
    with small_tiles():
        assert triton_fused.prepare(layout, torch.device("cpu")).num_slots > 20
        assert_near(Case.draw(layout, (2, 1), 48, torch.float32, value_dim=16))


@pytest.mark.parametrize(("layout", "heads", "head_dim"), SHORT_SHAPES)
def test_fp32_is_as_near_to_the_truth_as_the_definition_in_fp32(
    layout: Layout, heads: tuple[int, int], head_dim: int
) -> None:
    assert_near(Case.draw(layout, heads, head_dim, torch.float32))


@pytest.mark.parametrize(
    ("layout", "heads", "head_dim", "dtype"),
    [
        *((*shape, torch.bfloat16) for shape in SHAPES),
        *((*shape, torch.float16) for shape in SHORT_SHAPES),
    ],
)
def test_the_error_is_at_most_twice_that_of_the_definition_in_the_same_precision(
    layout: Layout, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    Case.draw(layout, heads, head_dim, dtype).assert_near(attention)


def test_values_may_be_narrower_than_keys() -> None:
    Case.draw(SHORT_RAGGED, (2, 2), 192, torch.bfloat16, value_dim=128).assert_near(attention)


def test_inputs_and_gradients_may_be_views() -> None:
    case = Case.draw(Layout.of_groups([(20, [9, 0])]), (2, 2), 16, torch.float32)
    qkv = torch.stack([case.q_THD, case.k_TGD, case.v_TGD])

    def gradients(one: Callable[..., torch.Tensor], dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        # One product gives all three, and the gradient of a sum is one number.
        mixed = qkv.to(dtype).movedim(0, dim).contiguous().requires_grad_()
        one(*mixed.unbind(dim), case.layout, case.scale, None).sum().backward()
        return mixed.grad.movedim(dim, 0)

    naive = BACKENDS["naive"].attention
    theirs, truth = gradients(naive, 1), gradients(naive, 1, torch.float64)
    with small_tiles():
        ours = [gradients(attention, dim) for dim in (-1, 1)]
    assert torch.equal(*ours)
    assert error_over_bound(ours[0], theirs, truth) <= 1


def test_a_buffer_without_tokens_has_gradients() -> None:
    out, *gradients = Case.draw(Layout((0, 0), (-1, 0)), (4, 2), 16, torch.float32).run(attention)
    assert [len(tensor) for tensor in (out, *gradients)] == [0] * 4


def test_results_do_not_depend_on_the_order_of_programs() -> None:
    case = Case.draw(Layout.of_groups([(30, [20, 17])]), (2, 1), 16, torch.float32)
    with small_tiles():
        tables = triton_fused.prepare(case.layout, torch.device("cpu"))
        shuffled = dataclasses.replace(
            tables,
            query_tiles=tables.query_tiles[torch.randperm(len(tables.query_tiles))],
            key_items=tables.key_items[torch.randperm(len(tables.key_items))],
            sums=tables.sums.flip(0),
        )
        first = case.run(attention)
        with mock.patch.object(triton_fused, "prepare", return_value=shuffled):
            again = case.run(attention)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_heads_above_the_widest_supported_are_refused() -> None:
    case = Case.draw(Layout((3,), (-1,)), (1, 1), 257, torch.float32)
    with pytest.raises(ValueError, match="heads must be at most 256 wide for --shared-prompt-backend triton, not 257"):
        case.run(attention)
