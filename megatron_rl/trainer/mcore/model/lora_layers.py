"""Layers that can have low-rank adapters: what an adapter must know of one, and the rows that the layer multiplies.

Megatron's own layers take the rows that they multiply. TransformerEngine's may normalize their rows first, or multiply
the rows of several experts, each with a weight of its own. They are told by the names of megatron-core's classes for
them, because the package may not be installed.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_rl.errors import InputError

_NORMALIZES = "TELayerNormColumnParallelLinear"
_PLAIN = ("TEColumnParallelLinear", "TERowParallelLinear", _NORMALIZES)
_GROUPED = ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")


@dataclasses.dataclass(frozen=True)
class LayerFacts:
    """The facts of a layer that decide how an adapter exchanges rows, and how its gradients are summed."""

    group: Any
    """The tensor-parallel ranks that divide the layer."""
    is_sequence_parallel: bool
    is_expert: bool


def describe_layer(layer: Any, is_expert: bool, name: str) -> LayerFacts:
    """Describe a layer; raise an InputError unless it is one of those that the sums over ranks are written for."""
    kind = type(layer).__name__
    is_engines = kind in (*_PLAIN, *_GROUPED)
    if not is_engines and not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
        raise InputError(
            f"--lora-targets: {name} belongs to a {kind}, which cannot have an adapter yet: write "
            f"--transformer-impl local, or name other modules"
        )
    if is_expert and (size := layer.config.expert_tensor_parallel_size) > 1:
        raise InputError(
            f"--lora-targets: {name} is divided over {size} ranks, and experts with adapters cannot be: write "
            f"--expert-tensor-parallel-size 1"
        )
    # Megatron takes the exchange of rows out of the layers of a shared expert.
    overlaps = layer.parallel_mode is None if is_engines else layer.explicit_expert_comm
    if not is_expert and overlaps:
        raise InputError(
            f"--lora-targets: {name} overlaps the exchange of tokens, and cannot with an adapter: drop "
            f"--moe-shared-expert-overlap"
        )
    if getattr(layer, "gather_output", False) or not getattr(layer, "input_is_parallel", True):
        raise InputError(f"--lora-targets: {name} exchanges its rows in a way that adapters do not: name other modules")
    return LayerFacts(layer._tp_group if is_engines else layer.tp_group, layer.sequence_parallel, is_expert)


def has_weight_for_each_expert(layer: Any) -> bool:
    """Check whether the layer multiplies the rows of several experts, each with a weight of its own."""
    return type(layer).__name__ in _GROUPED


def find_multiplied_rows(layer: Any, rows_RI: torch.Tensor) -> torch.Tensor:
    """Return the rows that the layer's weight multiplies, given those that the layer takes."""
    if type(layer).__name__ != _NORMALIZES:
        return rows_RI
    config, weight_I = layer.config, layer.layer_norm_weight
    shape, epsilon = rows_RI.shape[-1:], config.layernorm_epsilon
    weight_I = weight_I + 1 if config.layernorm_zero_centered_gamma else weight_I
    if config.normalization == "RMSNorm":
        return torch.nn.functional.rms_norm(rows_RI, shape, weight_I, epsilon)
    return torch.nn.functional.layer_norm(rows_RI, shape, weight_I, layer.layer_norm_bias, epsilon)
