"""The size of micro-batches on accelerators, which follows from the memory of the ranks' devices.

Invariants:

- a micro-batch holds whole groups, each with one copy of its prompt, if a group fits the device;
- it is the largest that fits, with at most `ENOUGH_TOKENS` a rank, and an update has at least `LEAST_MICRO_BATCHES`
  of them for each pipeline stage, as far as whole groups allow;
- cheap parts of layers are computed again only if a larger micro-batch fits with that.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.config.rank_bytes import Micro, ParameterBytes, RankBytes, RankMemory, RankSplit, Recomputed
from megatron_rl.sidecar.vllm import memory
from megatron_rl.types import Architecture

# Beyond these a device computes no faster: a Qwen3 of 0.6 B made 52,300 tokens/s on an H200 with packs of 35k tokens
# (44,300 with 9k), and larger models fill a device with fewer.
ENOUGH_TOKENS = 1 << 15
# Training begins with the first micro-batch, ends with the last, and stages wait for each other: few large ones would
# give back what groups that arrive one after another gain.
LEAST_MICRO_BATCHES = 8
NOTES = ("devices of ", "memory is short, ")
"""The beginnings of the notes about a choice."""
RECOMPUTED = ("recompute_granularity", "recompute_modules")
"""The fields of TransformerConfig that a choice may set."""
RECOMPUTE_NORMS = "--recompute-granularity selective --recompute-modules layernorm"
SWITCH = "--max-tokens-per-gpu"
"""The flag with which micro-batches no longer follow from devices, nor what is computed again."""
_GIB = 1 << 30
_MOMENTS = (("adam", 2), ("sgd", 1))

LookUp = Callable[[str], Any]
"""A function that returns the value of a target, or its default."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A size that micro-batches may have."""

    responses: int
    tokens: int
    """The most tokens of a micro-batch, prompts included."""
    num_micro_batches: int
    """The micro-batches of a replica in an update."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The size that is chosen, and what it takes."""

    size: Size
    taken: RankBytes
    fits: bool
    recomputes: bool = False


def choose_pack(
    sizes: Sequence[Size], group_size: int, most_tokens: int, num_stages: int, plain: RankMemory,
    recomputed: RankMemory | None, room: int,
) -> Chosen:  # fmt: skip
    """Choose the size of micro-batches; `room` is what a rank may be counted to need.

    `recomputed` is the memory of a rank that computes the cheap parts again; None if it may not.
    """
    whole = [size for size in sizes if size.responses % group_size == 0]
    enough = [
        size
        for size in whole
        if size.tokens <= most_tokens and size.num_micro_batches >= LEAST_MICRO_BATCHES * num_stages
    ]
    # One group, however long it is, and only if it does not fit a part of it.
    allowed = [*(size for size in sizes if size.responses < group_size), *whole[:1], *enough]
    pack = _choose_largest(allowed, plain, room)
    if recomputed is None:
        return pack
    other = dataclasses.replace(_choose_largest(allowed, recomputed, room), recomputes=True)
    is_better = other.size.responses > pack.size.responses or (other.fits and not pack.fits)
    return other if is_better else pack


def _choose_largest(sizes: Sequence[Size], rank: RankMemory, room: int) -> Chosen:
    """Choose the largest size that fits; the smallest one if none does."""
    packs = [Chosen(size, rank.estimate(Micro(size.tokens, size.num_micro_batches)), True) for size in sizes]
    fitting = [pack for pack in packs if pack.taken.total <= room]
    if fitting:
        return max(fitting, key=lambda pack: pack.size.responses)
    return dataclasses.replace(min(packs, key=lambda pack: pack.size.responses), fits=False)


def describe_pack(pack: Chosen, device: int, room: int, group_size: int) -> str:
    """Describe the choice in a line, with the parts of a rank's memory."""
    responses, taken = pack.size.responses, pack.taken
    if responses < group_size:
        what = f"a part of a group, {responses} of {group_size} responses"
    elif group_size == 1:
        what = f"{responses} demonstrations"
    else:
        what = "a group" if responses == group_size else f"{responses // group_size} groups"
    parts = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in vars(taken).items() if size >= _GIB / 20)
    end = "" if pack.fits else "; that is more than fits, so the run may end for lack of memory"
    return (
        f"devices of {device / _GIB:.0f} GiB make --micro-batch-size {responses}: {what}, up to {pack.size.tokens:,} "
        f"tokens, which are estimated to take {taken.total / _GIB:.1f} of a rank's {max(0, room) / _GIB:.1f} GiB "
        f"({parts or 'all parts small'}){end}"
    )


def describe_recomputation() -> str:
    """Describe what is computed again, and how to switch that off."""
    return (
        f"memory is short, so norms are computed again in the backward pass, as with {RECOMPUTE_NORMS}; {SWITCH} "
        "switches that off"
    )


def read_rank_memory(look_up: LookUp, architecture: Architecture, replicas: int) -> RankMemory:
    """Return the values that decide a rank's memory."""
    tensor, stages = (
        look_up("transformer.tensor_model_parallel_size"),
        look_up("transformer.pipeline_model_parallel_size"),
    )
    is_sequence_parallel = bool(look_up("transformer.sequence_parallel")) and tensor > 1
    expert_tensor = look_up("transformer.expert_tensor_parallel_size") or tensor
    split = RankSplit(
        tensor=tensor,
        pipeline=stages,
        num_virtual=_count_virtual(look_up, architecture, stages),
        context=look_up("transformer.context_parallel_size"),
        expert=look_up("transformer.expert_model_parallel_size") or 1,
        expert_tensor=expert_tensor,
        replicas=replicas,
        is_sequence_parallel=is_sequence_parallel,
    )
    beta, updates = look_up("algorithm.kl_beta"), _count_updates(look_up)
    is_sampled = look_up("run.stage") == "grpo"
    has_old = updates > 1 and look_up("loop.tri_model") != "separate"
    return RankMemory(
        architecture=architecture,
        split=split,
        parameter=_read_parameter(look_up, architecture),
        recomputed=_read_recomputed(look_up),
        # Adapters leave their base to all roles.
        num_frozen=(bool(beta) + has_old) if is_sampled and not look_up("lora.rank") else 0,
        is_frozen_offloaded=bool(look_up("loop.frozen_offload")),
        streams=is_sampled and look_up("rollout.transport") != "shm",
    )


def _count_virtual(look_up: LookUp, architecture: Architecture, stages: int) -> int:
    count, layers = look_up("layout.num_virtual_stages"), look_up("layout.layers_per_virtual_stage")
    if layers:
        return max(1, architecture.num_layers // stages // int(layers))
    return count or 1


def _count_updates(look_up: LookUp) -> int:
    prompts, of_update = look_up("algorithm.prompts_per_step"), look_up("training.global_batch_size")
    if prompts is None or of_update is None:
        return 1
    return max(1, prompts * look_up("algorithm.group_size") // of_update)


def _read_parameter(look_up: LookUp, architecture: Architecture) -> ParameterBytes:
    is_half = bool(look_up("transformer.bf16") or look_up("transformer.fp16"))
    in_fp32 = look_up("ddp.grad_reduce_in_fp32")
    moments = dict(_MOMENTS).get(look_up("optimizer.optimizer") or "adam", 2)
    state = 4.0 * (moments + is_half)
    if look_up("optimizer.use_precision_aware_optimizer"):
        names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")[: 1 + moments]
        dtypes = [look_up(f"optimizer.{name}") for name in names]
        state = float(sum(4 if dtype is None else dtype.itemsize for dtype in dtypes))
    if look_up("optimizer.optimizer_cpu_offload"):
        fraction = look_up("optimizer.optimizer_offload_fraction")
        state *= 1 - (1.0 if fraction is None else fraction)
    gradient = 2 if is_half and in_fp32 is False else 4
    if rank := look_up("lora.rank"):
        # Adapters have about this share of the parameters of their layers, and nothing else is trained.
        share = min(1.0, 3 * rank / architecture.hidden_size)
        gradient, state = share * gradient, share * state
    return ParameterBytes(
        weight=2 if is_half else 4,
        gradient=gradient,
        state=state,
        is_state_divided=bool(look_up("ddp.use_distributed_optimizer")),
    )


def _read_recomputed(look_up: LookUp) -> Recomputed:
    granularity = look_up("transformer.recompute_granularity")
    if granularity == "full":
        method, count = look_up("transformer.recompute_method"), look_up("transformer.recompute_num_layers")
        return Recomputed(method=method or "", num_layers=count or 1)
    modules = look_up("transformer.recompute_modules") or () if granularity == "selective" else ()
    return Recomputed(modules=frozenset(modules))


def count_room(
    device: int, rank: RankMemory, look_up: LookUp, architecture: Architecture, is_served_elsewhere: bool
) -> int:
    """Count the bytes that a rank may be counted to need; an engine on the same device gets its part first."""
    fixed = rank.estimate(Micro(0, 1)).total
    if look_up("run.stage") != "grpo" or not look_up("rollout.is_colocated") or is_served_elsewhere:
        return memory.count_room(device, fixed)
    if memory.is_divided_by_user(look_up("rollout.vllm_args")):
        return memory.count_room(math.floor(device * (1 - memory.read_share(look_up("rollout.vllm_args")))), fixed)
    needs = memory.count_needs(
        architecture,
        look_up("rollout.dtype") or architecture.dtype,
        look_up("rollout.tensor_parallel_size"),
        look_up("rollout.max_num_seqs"),
        look_up("rollout.max_model_len") or look_up("training.seq_length"),
        look_up("rollout.lora_rank") or (look_up("lora.rank") if look_up("publish.lora") == "adapter" else 0),
    )
    return memory.count_room(device, fixed, needs)
