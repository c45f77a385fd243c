"""Batch-invariant operations for training: their gradients are those of torch's own operations.

No engine computes gradients, so the backward pass is torch's own at the same inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megatron_rl.ops.invariant import rows

Compute = Callable[..., torch.Tensor]


def normalize(hidden: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `rows.normalize`."""
    return _compute(
        lambda hidden, weight_E: rows.normalize(hidden, weight_E, eps),
        lambda hidden, weight_E: F.rms_norm(hidden, (hidden.shape[-1],), weight_E, eps),
        hidden,
        weight_E,
    )


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `rows.swiglu`."""

    def compute_plainly(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    return _compute(rows.swiglu, compute_plainly, gate_up)


def rotate(heads_NHD: torch.Tensor, rotation_N2F: torch.Tensor) -> torch.Tensor:
    """Compute `rows.rotate` from a table of cosines and sines."""
    cosines_NF, sines_NF = rotation_N2F.unbind(1)
    # The operations are torch's own.
    return rows.rotate(heads_NHD, cosines_NF, sines_NF)


def _compute(compute: Compute, compute_plainly: Compute, *inputs: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _WithPlainGradients.apply(compute, compute_plainly, *inputs)
    return out


class _WithPlainGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, compute_plainly: Compute, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        ctx.compute_plainly = compute_plainly
        return compute(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[2:]
        inputs = [
            one.detach().requires_grad_(is_needed) for one, is_needed in zip(ctx.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.compute_plainly(*inputs)
        found = iter(torch.autograd.grad(out, [one for one in inputs if one.requires_grad], grad))
        return None, None, *(next(found) if is_needed else None for is_needed in needs)
