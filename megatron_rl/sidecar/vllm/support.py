"""What vLLM cannot do with a model, as far as config.json and flags tell: said before an engine is started.

Taken from vLLM 0.32's sources: vLLM itself may live in another environment. What is not here it says in its log.
"""

from collections.abc import Iterator
from typing import Literal

from megatron_rl.types import Architecture, RopeKind

# The columns of a head that its attention on a CPU is compiled for. With others it starts, and its first request fails.
CPU_HEAD_SIZES = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def problems(
    model: Architecture, device: Literal["cpu", "cuda", "npu"], tensor_parallel_size: int, max_model_len: int | None
) -> Iterator[str]:
    """Each thing that an engine of this model would end for."""
    if device == "cpu" and model.kv_channels not in CPU_HEAD_SIZES:
        yield (
            f"--hf-model: the model's heads have {model.kv_channels} columns (head_dim), and vLLM's attention on a CPU "
            f"takes {', '.join(map(str, CPU_HEAD_SIZES))}: choose a model with one of these, or engines on accelerators"
        )
    yield from _division(model, tensor_parallel_size)
    longest = _longest(model)
    if max_model_len is not None and max_model_len > longest:
        yield (
            f"--rollout-max-model-len {max_model_len} is above the model's longest sequence, {longest} "
            "(max_position_embeddings): write at most that"
        )


def _division(model: Architecture, size: int) -> Iterator[str]:
    """Devices share heads and columns evenly; several of them may have copies of the same keys and values."""
    if size < 1:
        return
    groups = model.num_query_groups
    columns = model.experts.ffn_hidden_size if model.experts else model.ffn_hidden_size
    uneven = [
        what
        for is_even, what in (
            (model.num_attention_heads % size == 0, f"{model.num_attention_heads} attention heads"),
            (max(groups, size) % min(groups, size) == 0, f"{groups} heads of keys and values"),
            (columns % size == 0, f"{columns} columns of {'an expert' if model.experts else 'the MLP'}"),
        )
        if not is_even
    ]
    if uneven:
        yield (
            f"--rollout-tensor-parallel-size {size}: the model's {' and '.join(uneven)} cannot be divided over so many "
            "devices: write another number"
        )


def _longest(model: Architecture) -> int:
    scale = model.rope.factor if model.rope.kind is RopeKind.LINEAR else 1.0
    return int(model.max_position_embeddings * scale)
