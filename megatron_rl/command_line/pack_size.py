"""The size of micro-batches on accelerators, which follows from the memory of the ranks' devices.

Invariants:

- a micro-batch holds whole groups, each with one copy of its prompt, if a group fits the device;
- it is the largest that fits, with at most `ENOUGH_TOKENS` a rank, and an update has at least `LEAST_MICRO_BATCHES`
  of them for each pipeline stage, as far as whole groups allow;
- cheap parts of layers are computed again only if a larger micro-batch fits with that.
"""

import dataclasses
import math
from collections.abc import Sequence

from megatron_rl.shared import device_memory
from megatron_rl.shared.device_memory import (
    GIB,
    PACK_FLAG,
    RECOMPUTE_NORMS,
    LookUp,
    Micro,
    RankBytes,
    RankMemory,
    read_engine_needs,
)
from megatron_rl.sidecar.vllm.flags import is_divided_by_user, read_share
from megatron_rl.types import SAMPLED

# Beyond these a device computes no faster: a Qwen3 of 0.6 B made 52,300 tokens/s on an H200 with packs of 35k tokens
# (44,300 with 9k), and larger models fill a device with fewer.
ENOUGH_TOKENS = 1 << 15
# Training begins with the first micro-batch, ends with the last, and stages wait for each other: few large ones would
# give back what groups that arrive one after another gain.
LEAST_MICRO_BATCHES = 8
NOTES = ("devices of ", "memory is short, ")
"""The beginnings of the notes about a choice."""
RECOMPUTATION = (
    f"memory is short, so norms are computed again in the backward pass, as with {RECOMPUTE_NORMS}; {PACK_FLAG} "
    "switches that off"
)
"""The note about norms that are computed again."""
RECOMPUTED = ("recompute_granularity", "recompute_modules")
"""The fields of TransformerConfig that a choice may set."""


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


def describe_pack(pack: Chosen, device: int, room: int, group_size: int, stage: str) -> str:
    """Describe the choice in a line, with the parts of a rank's memory."""
    responses, taken = pack.size.responses, pack.taken
    if responses < group_size:
        what = f"a part of a group, {responses} of {group_size} responses"
    elif stage != "grpo":
        what = f"{responses} {'pairs' if stage == 'dpo' else 'demonstrations'}"
    else:
        what = "a group" if responses == group_size else f"{responses // group_size} groups"
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in vars(taken).items() if size >= GIB / 20)
    end = "" if pack.fits else "; that is more than fits, so the run may end for lack of memory"
    return (
        f"devices of {device / GIB:.0f} GiB make --micro-batch-size {responses}: {what}, up to {pack.size.tokens:,} "
        f"tokens, which are estimated to take {taken.total / GIB:.1f} of a rank's {max(0, room) / GIB:.1f} GiB "
        f"({parts or 'all parts small'}){end}"
    )


def count_room(device: int, rank: RankMemory, look_up: LookUp, is_served_elsewhere: bool) -> int:
    """Count the bytes that a rank may be counted to need; an engine on the same device gets its part first."""
    fixed, vllm_args = rank.estimate(Micro(0, 1)).total, look_up("rollout.vllm_args")
    if look_up("run.stage") not in SAMPLED or look_up("rollout.colocate") == "off" or is_served_elsewhere:
        return device_memory.count_room(device, fixed)
    if look_up("rollout.colocate") == "sleep":
        return device_memory.count_room_beside_sleeper(device)
    if is_divided_by_user(vllm_args):
        return device_memory.count_room(math.floor(device * (1 - read_share(vllm_args))), fixed)
    return device_memory.count_room(device, fixed, read_engine_needs(look_up, rank.architecture))
