"""Megatron's linear layers with our operation (`ops.linear`) in place of Megatron's, where both compute the same.

These take Megatron's own way: frozen weights, weights that FSDP or another sharding of Megatron's divides, and weights
whose gradient is computed later.
"""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_rl.ops.linear import linear

# The other arguments of Megatron's functions, with the values for which they change nothing.
_WITHOUT_EFFECT = {"grad_output_buffer": None, "wgrad_deferral_limit": None, "gtp_remat_size": 1}


class _OurOperation:
    """The method of Megatron's layers that multiplies by the weight."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = _multiply(input, weight, *args, **kwargs)
        if found is None:
            found = super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        return found


class ColumnLinear(_OurOperation, ColumnParallelLinear):
    """Megatron's layer whose ranks have rows of the weight."""


class RowLinear(_OurOperation, RowParallelLinear):
    """Megatron's layer whose ranks have columns of the weight."""


_OURS = {ColumnParallelLinear: ColumnLinear, RowParallelLinear: RowLinear}


def replace_linear_layers(module: torch.nn.Module) -> None:
    """Have all of the module's linear layers that are exactly Megatron's use our operation."""
    for layer in module.modules():
        ours: Any = _OURS.get(type(layer))
        if ours is not None:
            layer.__class__ = ours


def _multiply(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """Return the product, from the arguments that Megatron's layers give; None if it is left to Megatron."""
    if not weight.requires_grad or hasattr(weight, "__fsdp_param__") or _has_effect(others):
        return None
    return linear(input, weight, bias, gradient_accumulation_fusion, tp_group, sequence_parallel, allreduce_dgrad)


def _has_effect(others: Mapping[str, Any]) -> bool:
    """Check whether any argument has another value than those known to change nothing."""
    return any(name not in _WITHOUT_EFFECT or value != _WITHOUT_EFFECT[name] for name, value in others.items())
