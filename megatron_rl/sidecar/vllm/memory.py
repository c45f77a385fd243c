"""The division of a device's memory between a rank and an engine that shares the device (--rollout-colocate).

vLLM alone would take nearly the whole device. Here the rank keeps what it was counted to need. The engine gets its
weights, room for its work, and a cache. Invariants:

- the cache never exceeds what all responses that are sampled at once fill at their full length, since the rest of it
  would stay empty;
- the cache holds at least one response at its full length, or the division is refused;
- rank, engine and a reserve together never exceed the device.

The bytes of work are estimates, on the large side. Where they are wrong, the flags in `MEMORY_FLAGS` divide instead.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from megatron_rl.errors import UsageError
from megatron_rl.shared.weights.mapping import Mapping, TensorSpec
from megatron_rl.sidecar.vllm.flags import FLAG, names_flag, split_flags
from megatron_rl.types import Architecture

FLAG_OF_SHARING = "--rollout-colocate"
MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override")
"""Flags of vLLM with which a user divides the memory instead."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of vLLM's slots for adapters."""

_GIB = 1 << 30
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# A multiple of the block sizes that vLLM's attention uses on devices.
_BLOCK_TOKENS = 64
# The context of a process on a device, with the workspaces of its libraries.
_CONTEXT = _GIB
# Graphs that vLLM captures, and the scratch of the digests that prove a publish.
_GRAPHS, _DIGESTS = _GIB, _GIB // 2
# The most tokens of a step in which vLLM's server reads prompts, on any device with less than 160 GiB.
_STEP_TOKENS = 8192
# Logits of the responses in float32: as computed, divided by the temperature, as log-probs, and with noise.
_LOGITS_COPIES = 4
# What a rank takes beyond the count: buffers of collectives, kernels' workspaces, gaps between blocks of memory.
_UNCOUNTED = 0.15
# The share of a device that is left to neither.
_RESERVE = 0.03


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """The memory that an engine is given on each of its devices."""

    share: float
    """The share of the device that must be free when the engine starts."""
    cache_bytes: int
    """Bytes of keys and values."""


@dataclasses.dataclass(frozen=True)
class EngineNeeds:
    """The bytes that an engine needs on each of its devices."""

    weights: int
    work: int
    """Bytes of a step, of a publish, of captured graphs, and of the device's context."""
    response: int
    """Bytes of the keys and values of one response and its prompt, at full length."""
    num_responses: int
    """The number of responses that are sampled at once."""


@dataclasses.dataclass(frozen=True)
class SharedDevice:
    """A device's bytes, divided."""

    device: int
    counted: int
    """Bytes that a rank was counted to need."""
    rank: int
    """Bytes that the rank keeps, with what the count leaves out."""
    needs: EngineNeeds
    cache: int

    @property
    def engine(self) -> int:
        return self.needs.weights + self.needs.work + self.cache

    @property
    def memory(self) -> EngineMemory:
        """The engine's part, as vLLM takes it."""
        return EngineMemory(share=math.ceil(1000 * self.engine / self.device) / 1000, cache_bytes=self.cache)

    def describe(self) -> str:
        """Describe the division in a line."""
        needs, count = self.needs, self.cache // self.needs.response
        held = f"all {needs.num_responses}" if count >= needs.num_responses else f"{count} of {needs.num_responses}"
        return (
            f"device memory: {_gib(self.device)} GiB, of it {_gib(self.rank)} for a rank ({_gib(self.counted)} "
            f"counted) and {_gib(self.engine)} for an engine: weights {_gib(needs.weights)}, work "
            f"{_gib(needs.work)}, cache {_gib(self.cache)}, which holds {held} responses at full length"
        )


def is_divided_by_user(vllm_args: str) -> bool:
    """Check whether a user's flags of vLLM divide the memory."""
    return names_flag(split_flags(vllm_args), *MEMORY_FLAGS)


def read_share(vllm_args: str) -> float:
    """Return the share of a device that a user's flags of vLLM give an engine; half if they say it in another way."""
    words = " ".join(split_flags(vllm_args)).replace("=", " ").split()
    given = [value for name, value in itertools.pairwise(words) if name == MEMORY_FLAGS[0]]
    try:
        return float(given[-1])
    except (IndexError, ValueError):
        return 0.5


def find_slot_rank(rank: int) -> int:
    """Return the rank of vLLM's slot for adapters of this rank; 0 for none."""
    return next(size for size in (0, *LORA_RANKS) if size >= rank)


def count_needs(
    architecture: Architecture,
    dtype: str,
    tensor_parallel_size: int,
    max_num_seqs: int,
    max_model_len: int,
    lora_rank: int = 0,
) -> EngineNeeds:
    """Count the bytes that an engine needs on each of its devices."""
    size, item = tensor_parallel_size, _ITEM_BYTES[dtype]
    specs = Mapping(architecture).manifest()
    tensors = [spec.num_elements for spec in specs]
    # Every matrix has a slot, of which workers divide only some factors.
    slots = find_slot_rank(lora_rank) * sum(sum(spec.shape) for spec in specs if len(spec.shape) == 2)
    experts = architecture.experts
    columns = architecture.ffn_hidden_size
    if experts:
        columns = experts.num_active * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
    step = _STEP_TOKENS * (4 * architecture.hidden_size + 3 * math.ceil(columns / size)) * item
    logits = _LOGITS_COPIES * max_num_seqs * architecture.vocab_size * _ITEM_BYTES["float32"]
    # vLLM loads a layer into new memory before it copies the layer, and each tensor comes in a precision of its own.
    publish = max(tensors) * _ITEM_BYTES["float32"] + math.ceil(_count_largest_layer(specs) / size) * item
    channels = architecture.cached_channels
    if architecture.latents is None:
        channels = channels // architecture.num_query_groups * max(1, architecture.num_query_groups // size)
    of_token = architecture.num_full_layers * channels * item
    return EngineNeeds(
        weights=(math.ceil(sum(tensors) / size) + slots) * item,
        work=_CONTEXT + _GRAPHS + _DIGESTS + step + logits + publish,
        response=math.ceil(max_model_len / _BLOCK_TOKENS) * _BLOCK_TOKENS * of_token
        + _count_states(architecture, size),
        num_responses=max_num_seqs,
    )


def _count_largest_layer(specs: Sequence[TensorSpec]) -> int:
    """Count the numbers of the largest layer that vLLM loads at once: all experts of a block are one."""
    layers: collections.Counter[str] = collections.Counter()
    for spec in specs:
        block, is_expert, _ = spec.name.partition(".experts.")
        layers[block if is_expert else spec.name.rsplit(".", 2)[0]] += spec.num_elements
    return max(layers.values())


def _count_states(architecture: Architecture, size: int) -> int:
    """Count the bytes of a response's states in linear layers, with the rows that their convolutions reach back to."""
    one = architecture.linear
    if one is None:
        return 0
    state = one.num_value_heads * one.key_head_dim * one.value_head_dim
    rows = one.num_key_heads * one.channels_of_key_head * (one.window - 1)
    num_layers = architecture.num_layers - architecture.num_full_layers
    return num_layers * math.ceil((state + rows) / size) * _ITEM_BYTES["float32"]


def divide(device: int, counted: int, needs: EngineNeeds) -> SharedDevice:
    """Divide a device between a rank, counted to need `counted` bytes, and an engine; raise a UsageError if it cannot.

    vLLM keeps one block for itself; the cache has room for it.
    """
    rank = math.ceil(counted * (1 + _UNCOUNTED)) + _CONTEXT
    room = math.floor(device * (1 - _RESERVE)) - rank - needs.weights - needs.work
    if room < needs.response:
        raise UsageError(_describe_lack(device, rank, counted, needs))
    return SharedDevice(device, counted, rank, needs, min(room, (needs.num_responses + 1) * needs.response))


def count_room(device: int, fixed: int, needs: EngineNeeds | None = None) -> int:
    """Return the bytes that a rank of such a device may be counted to need, activations included.

    An engine that shares the device keeps its weights and work. Of what then remains beside the rank's `fixed` bytes,
    the engine's cache gets half, or less if all responses fit into less.
    """
    room = math.floor(device * (1 - _RESERVE)) - _CONTEXT
    if needs is not None:
        room -= needs.weights + needs.work
        half = (room - math.ceil(fixed * (1 + _UNCOUNTED))) // 2
        room -= max(needs.response, min(half, (needs.num_responses + 1) * needs.response))
    return math.floor(room / (1 + _UNCOUNTED))


def _describe_lack(device: int, rank: int, counted: int, needs: EngineNeeds) -> str:
    least = needs.weights + needs.work + needs.response
    return (
        f"{FLAG_OF_SHARING} does not fit a device of {_gib(device)} GiB: a rank needs {_gib(rank)} ({_gib(counted)} "
        f"counted) and an engine at least {_gib(least)}: weights {_gib(needs.weights)}, work {_gib(needs.work)}, "
        f"{_gib(needs.response)} for one response. Lower --micro-batch-size, --seq-length or --rollout-max-num-seqs, "
        f"give engines devices of their own, or divide the memory yourself: {FLAG}='{MEMORY_FLAGS[0]} 0.3'"
    )


def list_flags(memory: EngineMemory) -> Iterator[str]:
    """Yield the flags of vLLM that give an engine this memory."""
    yield from ("--gpu-memory-utilization", str(memory.share))
    yield from ("--kv-cache-memory-bytes", str(memory.cache_bytes))


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f}"
