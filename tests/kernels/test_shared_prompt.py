"""The naive backend against attention written another way, and the properties that every backend must keep."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops.shared_prompt import shared_prompt_attention
from megatron_rl.ops.shared_prompt.backends import naive
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from tests.kernels.drawn_layouts import layouts
from tests.truth import error_over_bound


def path_rows(layout: Layout, segment: int) -> list[int]:
    """List the rows of a segment and of all segments above it, from the top."""
    above = path_rows(layout, layout.parents[segment]) if layout.parents[segment] != ROOT else []
    return above + list(range(int(layout.starts[segment]), int(layout.starts[segment + 1])))


def draw_qkv(num_tokens: int, heads: int, groups: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = ((num_tokens, heads, head_dim), (num_tokens, groups, head_dim), (num_tokens, groups, head_dim))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def sequence_by_sequence(
    qkv: list[torch.Tensor],
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute each segment's path as a plain causal sequence, and keep the segment's own rows."""
    q_THD, k_TGD, v_TGD = qkv
    repeat = q_THD.shape[1] // k_TGD.shape[1]
    # Zero, and connected to all three inputs, so that each has a gradient even without tokens.
    out_THD = torch.zeros_like(q_THD) + 0 * (q_THD.sum() + k_TGD.sum() + v_TGD.sum())
    for segment in range(layout.num_segments):
        rows = path_rows(layout, segment)
        length = layout.lengths[segment]
        if not length:
            continue
        q, k, v = (
            tensor[rows].repeat_interleave(r, 1).transpose(0, 1)
            for tensor, r in ((q_THD, 1), (k_TGD, repeat), (v_TGD, repeat))
        )
        scores = q @ k.transpose(1, 2) * scale
        distance = torch.arange(len(rows))[:, None] - torch.arange(len(rows))[None, :]
        hidden = (distance < 0) | (distance >= (window or len(rows)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        if sinks_H is not None:
            # The share of the tokens is one minus that of the sink.
            totals = scores.masked_fill(hidden, float("-inf")).exp().sum(-1, keepdim=True)
            weights = weights * totals / (totals + sinks_H.exp()[:, None, None])
        out = weights @ v
        out_THD = out_THD.index_copy(0, torch.tensor(rows[-length:]), out.transpose(0, 1)[-length:])
    return out_THD


@settings(max_examples=60)
@given(layouts(), st.sampled_from([(4, 4), (4, 2), (3, 1)]), st.sampled_from([None, 1, 4]), st.booleans())
def test_each_segment_attends_as_if_its_path_stood_alone(
    layout: Layout, heads: tuple[int, int], window: int | None, has_sinks: bool
) -> None:
    sinks = [torch.linspace(-1, 2, heads[0], dtype=torch.float64).requires_grad_()] if has_sinks else []
    packed = [*draw_qkv(layout.num_tokens, *heads, 8, torch.float64), *sinks]
    alone = [tensor.detach().clone().requires_grad_() for tensor in packed]
    out = shared_prompt_attention(*packed[:3], layout, 0.4, window, "naive", *packed[3:])
    reference = sequence_by_sequence(alone[:3], layout, 0.4, window, *alone[3:])
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-12)
    weights = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
    (out * weights).sum().backward()
    (reference * weights).sum().backward()
    for mine, theirs in zip(packed, alone, strict=True):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(mine.grad, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_stays_near_double(dtype: torch.dtype) -> None:
    layout = Layout.of_groups([(9, [5, 0, 7]), (0, [4]), (3, [1])])
    exact = draw_qkv(layout.num_tokens, 4, 2, 16, torch.float64)
    rounded = [tensor.detach().to(dtype) for tensor in exact]
    truth = shared_prompt_attention(*[tensor.double() for tensor in rounded], layout, 0.25)
    ours, theirs = shared_prompt_attention(*rounded, layout, 0.25), sequence_by_sequence(rounded, layout, 0.25, None)
    assert error_over_bound(ours, theirs, truth) <= 1


@given(layouts())
def test_positions_count_along_each_path(layout: Layout) -> None:
    for segment in range(layout.num_segments):
        rows = path_rows(layout, segment)
        assert layout.positions[rows].tolist() == list(range(len(rows)))
        assert layout.last_row(segment) == (rows[-1] if rows else None)


@given(layouts())
def test_a_token_sees_its_path_up_to_itself_and_nothing_else(layout: Layout) -> None:
    visible = layout.visible()
    for segment in range(layout.num_segments):
        path = path_rows(layout, segment)
        for row in range(int(layout.starts[segment]), int(layout.starts[segment + 1])):
            assert visible[row].nonzero()[0].tolist() == [token for token in path if token <= row]


def test_a_layout_whose_parents_do_not_come_first_is_refused() -> None:
    with pytest.raises(ValueError, match="the parent of segment 0 must be -1 or an earlier segment, not 1"):
        Layout((1, 1), (1, ROOT))
    with pytest.raises(ValueError, match="the length of segment 0 must be at least 0, not -1"):
        Layout((-1,), (ROOT,))


@given(layouts(), st.none() | st.integers(1, 9))
def test_the_mask_that_is_made_on_a_device_is_the_layouts(layout, window) -> None:
    mask_TT = naive.prepare(layout, torch.device("cpu")).visible(window)
    assert np.array_equal(mask_TT.numpy(), layout.visible(window))
