"""Shared-prompt attention by our own Triton kernels: each token attends once, to all tokens that it sees.

One kernel computes attention, one the gradient of queries, and one the gradients of keys and values. A fourth kernel
sums the results of several programs for the same keys, in a fixed order: the same inputs give the same bits.

Letters: T tokens, H query heads, G key-value heads, D head dimension, V that of values.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt.backends import add_sinks, attend_to_nothing, differentiate_sinks, make_rows_dense
from megatron_rl.ops.shared_prompt.backends.triton_blocks import Blocks, choose_blocks, find_chip
from megatron_rl.ops.shared_prompt.backends.triton_tables import TileTables
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.shared_prompt.tables import find_tables
from megatron_rl.ops.triton_support import launch, refuse_triton

NARROWEST, WIDEST = 16, 256
# The rows of a program of the summing kernel.
SUMMED = 16


def refusal(conditions: Conditions) -> str | None:
    """Refuse what `refuse_triton` does, and wide heads."""
    widest = max(conditions.head_dim or 0, conditions.value_dim or 0)
    if widest > WIDEST:
        return f"heads must be at most {WIDEST} wide, and the model's are {widest} wide"
    return refuse_triton(conditions.device, conditions.dtype)


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> TileTables:
    """Return the tables of the rows that each program computes."""
    return layout.once(TileTables.of, *_name_window(window))


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `naive.attention`."""
    widest = max(q_THD.shape[-1], v_TGD.shape[-1])
    if widest > WIDEST:
        raise ValueError(f"heads must be at most {WIDEST} wide for --shared-prompt-backend triton, not {widest}")
    if layout.num_tokens == 0:
        return attend_to_nothing(q_THD, k_TGD, v_TGD, sinks_H)
    tables = find_tables(layout, q_THD.device, TileTables.of, *_name_window(window))
    out_THD: torch.Tensor = _Fused.apply(q_THD, k_TGD, v_TGD, sinks_H, tables, scale)
    return out_THD


def _name_window(window: int | None) -> tuple[int, ...]:
    """Return the argument of tables for a window; there is none without one."""
    return () if window is None else (window,)


def compute_width(head_dim: int) -> int:
    """Return the columns of a head in a block: a power of two, and enough for a product of blocks."""
    return max(NARROWEST, 1 << (head_dim - 1).bit_length())


def compute_sizes(head_dim: int, value_dim: int) -> dict[str, int]:
    """Return the constants of the kernels that follow from the widths of keys and of values."""
    return {
        "HEAD_DIM": head_dim,
        "WIDTH": compute_width(head_dim),
        "VALUE_DIM": value_dim,
        "VALUE_WIDTH": compute_width(value_dim),
    }


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        tables: TileTables,
        scale: float,
    ) -> torch.Tensor:
        inputs = [make_rows_dense(tensor) for tensor in (q_THD, k_TGD, v_TGD)]
        launcher = _Launcher(tables, scale, inputs)
        out_THD, log_totals_HT = launcher.attend()
        if sinks_H is not None:
            out_THD, log_totals_TH = add_sinks(out_THD, log_totals_HT.T, sinks_H, math.log(2))
            log_totals_HT = log_totals_TH.T.contiguous()
        ctx.save_for_backward(*inputs, sinks_H, out_THD, log_totals_HT)
        ctx.tables, ctx.scale = tables, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *inputs, sinks_H, out_THD, log_totals_HT = ctx.saved_tensors
        launcher, grad_sinks_H = _Launcher(ctx.tables, ctx.scale, inputs), None
        if sinks_H is not None:
            grad_sinks_H = differentiate_sinks(grad_out_THD, out_THD, log_totals_HT.T, sinks_H, math.log(2))
        gradients = launcher.differentiate(make_rows_dense(grad_out_THD), out_THD, log_totals_HT)
        return (*gradients, grad_sinks_H, None, None)


class _Launcher:
    """Calls the kernels with the arguments that they share."""

    def __init__(self, tables: TileTables, scale: float, inputs: Sequence[torch.Tensor]) -> None:
        q_THD, k_TGD, v_TGV = inputs
        self._tables = tables
        self._scale = scale
        self._inputs = inputs
        self._strides = [stride for tensor in inputs for stride in tensor.stride()[:2]]
        self._num_tokens, self._num_heads, head_dim = q_THD.shape
        self._num_groups = k_TGD.shape[1]
        self._sizes = {**compute_sizes(head_dim, v_TGV.shape[-1]), "TILE": tables.tile}
        widest = max(self._sizes["WIDTH"], self._sizes["VALUE_WIDTH"])
        self._blocks = choose_blocks(widest, q_THD.dtype, find_chip(q_THD.device))

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention, and the base-2 logarithm of each softmax's denominator [H, T]."""
        from megatron_rl.ops.shared_prompt.backends.triton_kernels import forward_kernel

        out_THV = self._inputs[0].new_empty((self._num_tokens, self._num_heads, self._inputs[2].shape[-1]))
        log_totals_HT = self._allocate_per_row()
        tables, blocks = self._tables, self._blocks.forward
        grid = len(tables.query_tiles) * (tables.tile // blocks.queries), self._num_heads
        rows = [tables.query_tiles, tables.ranges, tables.positions_T]
        self._launch(forward_kernel, grid, blocks, [out_THV, log_totals_HT, *rows])
        return out_THV, log_totals_HT

    def differentiate(
        self, grad_out_THD: torch.Tensor, out_THD: torch.Tensor, log_totals_HT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients of queries, keys and values."""
        from megatron_rl.ops.shared_prompt.backends.triton_kernels import (
            key_gradients_kernel,
            query_gradients_kernel,
            sum_kernel,
        )

        grad_q_THD, grad_k_TGD, grad_v_TGD = (_allocate_like(tensor) for tensor in self._inputs)
        tables, deltas_HT, strides = self._tables, self._allocate_per_row(), grad_out_THD.stride()[:2]
        given = (grad_out_THD, log_totals_HT, deltas_HT)

        blocks = self._blocks.query_gradients
        grid = len(tables.query_tiles) * (tables.tile // blocks.queries), self._num_heads
        tensors = [*given, out_THD, grad_q_THD, tables.query_tiles, tables.ranges, tables.positions_T]
        self._launch(query_gradients_kernel, grid, blocks, tensors, strides)

        blocks = self._blocks.key_gradients
        grid = len(tables.key_items) * (tables.tile // blocks.keys), self._num_groups
        partial = [self._allocate_per_slot(self._sizes[width]) for width in ("WIDTH", "VALUE_WIDTH")]
        found = [grad_k_TGD, grad_v_TGD, *partial]
        tensors = [*given, *found, tables.key_items, tables.positions_T]
        self._launch(key_gradients_kernel, grid, blocks, tensors, strides)

        if tables.num_slots:
            grid = len(tables.sums) * (tables.tile // SUMMED), self._num_groups
            launch(sum_kernel, grid, *found, tables.sums, **self._sizes, KEYS=SUMMED)
        return grad_q_THD, grad_k_TGD, grad_v_TGD

    def _launch(
        self,
        kernel: Any,
        grid: tuple[int, int],
        blocks: Blocks,
        tensors: Sequence[torch.Tensor],
        strides: Sequence[int] = (),
    ) -> None:
        launch(
            kernel,
            grid,
            *self._inputs,
            *tensors,
            self._scale,
            *self._strides,
            *strides,
            self._num_tokens,
            self._num_heads // self._num_groups,
            **self._sizes,
            WINDOW=self._tables.window or 0,
            QUERIES=blocks.queries,
            KEYS=blocks.keys,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )

    def _allocate_per_row(self) -> torch.Tensor:
        return self._inputs[0].new_empty((self._num_heads, self._num_tokens), dtype=torch.float32)

    def _allocate_per_slot(self, width: int) -> torch.Tensor:
        shape = (self._tables.num_slots, self._num_groups, self._tables.tile, width)
        return self._inputs[0].new_empty(shape, dtype=torch.float32)


def _allocate_like(tensor_THD: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor_THD, memory_format=torch.contiguous_format)
