"""The causal convolution of linear layers over a forest of segments: each channel for itself.

A token's result is a weighted sum of the last W tokens of its sequence, itself included. The first tokens of a segment
reach back into the segments above it. Before a root there is nothing.

Letters: T tokens, C channels, W tokens of the window.
"""

import itertools
from typing import Any

import numpy as np
import torch

from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from megatron_rl.ops.shared_prompt.tables import find_tables


def causal_convolution(x_TC: torch.Tensor, weight_CW: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Convolve each channel with its weights, the last of which belongs to the token itself; sum in fp32 at least."""
    rows_WT = find_tables(layout, x_TC.device, list_window_rows, weight_CW.shape[1])
    out_TC: torch.Tensor = _Convolution.apply(x_TC, weight_CW, rows_WT)
    return out_TC


def list_window_rows(layout: Layout, width: int) -> torch.Tensor:
    """List the rows of each token's window, [W, T], its own last; the number of tokens stands for nothing."""
    num_tokens = layout.num_tokens
    rows_WT = np.tile(np.arange(num_tokens), (width, 1)) - np.arange(width - 1, -1, -1)[:, None]
    starts = layout.starts.tolist()
    for segment, (start, end) in enumerate(itertools.pairwise(starts)):
        above = _last_rows_above(layout, segment, width - 1)
        for row in range(start, min(end, start + width - 1)):
            for step in range(row - start + 1, width):
                rows_WT[width - 1 - step, row] = above[row - start - step]
    return torch.from_numpy(rows_WT)


def _last_rows_above(layout: Layout, segment: int, number: int) -> list[int]:
    """List the last rows before a segment in its sequence, after as many of nothing as are missing."""
    rows: list[int] = []
    segment = layout.parents[segment]
    while segment != ROOT and len(rows) < number:
        start, end = int(layout.starts[segment]), int(layout.starts[segment + 1])
        rows = [*range(max(start, end - number + len(rows)), end), *rows]
        segment = layout.parents[segment]
    return [layout.num_tokens] * (number - len(rows)) + rows


class _Convolution(torch.autograd.Function):
    """Keeps its input alone, and not the W inputs of each token."""

    @staticmethod
    def forward(ctx: Any, x_TC: torch.Tensor, weight_CW: torch.Tensor, rows_WT: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TC, weight_CW, rows_WT)
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        filled, out_TC = _fill(x_TC), torch.zeros(x_TC.shape, dtype=wide, device=x_TC.device)
        for rows_T, weight_C in zip(rows_WT, weight_CW.to(wide).unbind(1), strict=True):
            out_TC.addcmul_(filled.index_select(0, rows_T).to(wide), weight_C)
        return out_TC.to(x_TC.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x_TC, weight_CW, rows_WT = ctx.saved_tensors
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        filled, wide_TC = _fill(x_TC), grad_TC.to(wide)
        grad_filled = torch.zeros(filled.shape, dtype=wide, device=x_TC.device)
        grads_W = []
        for rows_T, weight_C in zip(rows_WT, weight_CW.to(wide).unbind(1), strict=True):
            grad_filled.index_add_(0, rows_T, wide_TC * weight_C)
            grads_W.append((filled.index_select(0, rows_T).to(wide) * wide_TC).sum(dim=0))
        return grad_filled[:-1].to(x_TC.dtype), torch.stack(grads_W, dim=1).to(weight_CW.dtype), None


def _fill(x_TC: torch.Tensor) -> torch.Tensor:
    """Append the row of zeros that stands for nothing."""
    return torch.cat((x_TC, x_TC.new_zeros(1, x_TC.shape[1])))
