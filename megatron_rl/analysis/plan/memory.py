"""Formulas that estimate whether a split fits the devices' memory; `megatron-rl doctor --fit` counts it exactly.

The optimizer is Adam, divided over replicas; weights are bf16, gradients and states fp32.
"""

import dataclasses

from megatron_rl.analysis.plan.figures import DeviceSplit, ParameterCounts, count_context_bytes, count_parameters
from megatron_rl.types import Architecture

_GIB = 1 << 30
_WEIGHT, _GRADIENT, _STATE = 2, 4, 12
# A tensor in transfer to engines, twice; the logits of a block of the vocabulary, which their gradient replaces.
_PUBLISH = 2 << 28
_LOGITS = 1 << 29
# The share of a device's memory that vLLM takes by default, and its bytes besides weights and the cache.
_ENGINE_SHARE, _ENGINE_OTHER = 0.9, 4 * _GIB
# The share of a trainer's memory that is left by the device itself, collectives and gaps between blocks.
_TRAINER_SHARE = 0.92


@dataclasses.dataclass(frozen=True)
class Micro:
    """The largest micro-batch."""

    tokens: int
    num_in_schedule: int
    num_virtual: int = 1


def count_trainer_bytes(
    architecture: Architecture, split: DeviceSplit, micro: Micro, num_frozen: int = 0, recomputes: bool = False
) -> int:
    """Count the bytes of a rank of the first stage, which keeps more micro-batches than any other."""
    size = count_parameters(architecture)
    weights = _count_of_rank(size, split)
    of_experts = size.num_layers * size.of_experts / (split.pipeline * split.expert)
    owned = (weights - of_experts) / (split.replicas * split.context)
    owned += of_experts * split.expert / (split.replicas * split.context * split.tensor)
    of_layer = _count_kept_of_layer(architecture)
    kept = 2 * architecture.hidden_size if recomputes else of_layer
    rows = micro.tokens / (split.tensor * split.context)
    in_flight = min(split.pipeline, micro.num_in_schedule)
    if micro.num_virtual > 1:
        ahead = 2 * (split.pipeline - 1) + (micro.num_virtual - 1) * split.pipeline + 1
        in_flight = min(ahead, micro.num_in_schedule * micro.num_virtual) / micro.num_virtual  # type: ignore[assignment]
    activations = in_flight * rows * kept * size.num_layers / split.pipeline
    last = _LOGITS if split.pipeline == 1 else 0
    total = weights * (_WEIGHT * (1 + num_frozen) + _GRADIENT) + owned * _STATE + activations + rows * of_layer
    return round(total + last + _PUBLISH)


def fits_trainer(
    architecture: Architecture,
    split: DeviceSplit,
    micro: Micro,
    gib: float,
    num_frozen: int = 0,
    recomputes: bool = False,
) -> bool:
    """Check that a rank fits a device with `gib` GiB."""
    return count_trainer_bytes(architecture, split, micro, num_frozen, recomputes) <= gib * _GIB * _TRAINER_SHARE


def count_running(architecture: Architecture, tensor: int, context: float, gib: float) -> int:
    """Count the responses of `context` tokens, prompts included, that an engine's cache holds; 0 if none fits."""
    size = count_parameters(architecture)
    room = tensor * (gib * _GIB * _ENGINE_SHARE - _ENGINE_OTHER) - size.total * _WEIGHT
    # With more devices than query groups, keys and values of a group lie on several devices.
    copies = max(1, tensor // architecture.num_query_groups)
    return max(0, int(room / (count_context_bytes(architecture) * copies * context)))


def _count_of_rank(size: ParameterCounts, split: DeviceSplit) -> float:
    """Count the parameters of a rank of the first stage, which has the embedding; a lone stage has the output layer."""
    layers = size.num_layers / split.pipeline
    vocabulary = size.of_vocabulary * (2 if split.pipeline == 1 and not size.is_tied else 1)
    return (layers * size.of_layer + vocabulary) / split.tensor + layers * size.of_experts / split.expert


def _count_kept_of_layer(architecture: Architecture) -> int:
    """Count the bytes that a layer of Megatron's own keeps for a token, in bf16; norms compute in fp32."""
    hidden = architecture.hidden_size
    heads = (architecture.num_attention_heads + architecture.num_query_groups) * architecture.kv_channels
    kept = 22 * hidden + (14 if architecture.qk_layernorm else 6) * heads
    experts = architecture.experts
    if experts is None:
        return kept + 10 * architecture.ffn_hidden_size
    routed = experts.num_active * (3 * hidden + 5 * experts.ffn_hidden_size)
    return kept + 2 * routed + 4 * experts.num_experts
