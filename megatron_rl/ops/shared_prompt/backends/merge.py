"""Shared-prompt attention by flash operators, torch's own or torch_npu's: several calls, whose results are merged.

Each strand attends causally to itself, and to all of each range above it. A row's results are averaged, weighted by
their shares of the full softmax's denominator. A call's backward gets the merged results and denominator in place of
its own. Then it computes its part of the full gradients, and the parts are added.
The operators have one width for all heads, so narrower values get columns of zeros.

Letters: T tokens, H query heads, G key-value heads, D head dimension.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt.backends import (
    add_sinks,
    attend_to_nothing,
    attend_with_equal_widths,
    differentiate_sinks,
    make_rows_dense,
)
from megatron_rl.ops.shared_prompt.backends.flash_cpu import CpuFlash
from megatron_rl.ops.shared_prompt.backends.flash_varlen import VarlenFlash, find_kernels
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.shared_prompt.tables import find_tables


class Flash(Protocol):
    """Attention over a layout, whose gradients need its results and denominators."""

    def forward(self, inputs: Sequence[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the logarithm of each softmax's denominator."""

    def backward(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
    ) -> list[torch.Tensor]:
        """Return the gradients of queries, keys and values from the output's, the output and the logarithms."""


def refusal(conditions: Conditions) -> str | None:
    """Refuse windows, which the operators do not support above a strand, fp32 on accelerators, and sinks on NPUs."""
    if conditions.window is not None:
        return "it has no sliding window"
    if conditions.device not in ("cpu", "cuda", "npu"):
        return f"flash operators are missing for {conditions.device}"
    if conditions.device != "cpu" and not conditions.is_half:
        return f"on {conditions.device} it needs --bf16 or --fp16"
    if conditions.device == "npu" and conditions.has_sinks:
        return "on npu it has no sinks"
    return None


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> CpuFlash | VarlenFlash:
    """Return the calls that compute attention over the layout."""
    return layout.once(*choose_calls(device))


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `naive.attention`, without a window."""
    assert window is None
    return attend_and_merge(q_THD, k_TGD, v_TGD, layout, scale, sinks_H, *choose_calls(q_THD.device))


def choose_calls(device: torch.device) -> tuple[Any, ...]:
    """Return the function that plans the calls on a device of this type, and its arguments after the layout."""
    return (CpuFlash.of,) if device.type == "cpu" else (VarlenFlash.of, find_kernels(device.type))


def attend_and_merge(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    sinks_H: torch.Tensor | None,
    plan: Callable[..., Flash],
    *arguments: Hashable,
) -> torch.Tensor:
    """Compute attention by the calls of `plan(layout, *arguments)`."""
    if layout.num_tokens == 0:
        return attend_to_nothing(q_THD, k_TGD, v_TGD, sinks_H)
    flash = find_tables(layout, q_THD.device, plan, *arguments)

    def attend(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        if isinstance(flash, CpuFlash) and flash.is_plain and sinks_H is None:
            return flash.alone((q_THD, k_TGD, v_TGD), scale)
        out_THD: torch.Tensor = _Merged.apply(q_THD, k_TGD, v_TGD, sinks_H, flash, scale)
        return out_THD

    return attend_with_equal_widths(attend, q_THD, k_TGD, v_TGD)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        sinks_H: torch.Tensor | None,
        flash: Flash,
        scale: float,
    ) -> torch.Tensor:
        inputs = [make_rows_dense(tensor) for tensor in (q_THD, k_TGD, v_TGD)]
        out_THD, lse = flash.forward(inputs, scale)
        if sinks_H is not None:
            # One of the two has a row for each head.
            is_by_head = isinstance(flash, VarlenFlash)
            out_THD, lse_TH = add_sinks(out_THD, lse.T if is_by_head else lse, sinks_H)
            lse = lse_TH.T.contiguous() if is_by_head else lse_TH
        ctx.save_for_backward(*inputs, sinks_H, out_THD, lse)
        ctx.flash, ctx.scale = flash, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *inputs, sinks_H, out_THD, lse = ctx.saved_tensors
        grad_sinks_H = None
        if sinks_H is not None:
            lse_TH = lse.T if isinstance(ctx.flash, VarlenFlash) else lse
            grad_sinks_H = differentiate_sinks(grad_out_THD, out_THD, lse_TH, sinks_H)
        gradients = ctx.flash.backward(inputs, (make_rows_dense(grad_out_THD), out_THD, lse), ctx.scale)
        return (*gradients, grad_sinks_H, None, None)
