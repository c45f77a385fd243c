"""Weights that stream from the trainer's devices to the engines': what vLLM's own `nccl` backend is told.

The trainer is rank 0 of one group; the workers of the engines follow, engine after engine. vllm-ascend registers its
HCCL backend under the same name and takes the same calls. None of this has run: no machine of ours has either.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from megatron_rl.errors import InputError
from megatron_rl.protocol.wire import Weights


@dataclasses.dataclass(frozen=True)
class StreamPlace:
    """Where an engine's workers stand in the group."""

    first_rank: int
    world_size: int
    """Of the group: the trainer's sender and all workers."""
    packed_in_update: bool = False
    """vllm-ascend 0.23 wants `packed` with each update, vLLM 0.32 with the group."""


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """One POST to an engine."""

    route: str
    content: dict[str, object] | None = None


def places(num_workers: Sequence[int], packed_in_update: bool = False) -> list[StreamPlace]:
    """The places of engines with these numbers of workers."""
    world_size = 1 + sum(num_workers)
    firsts = [1 + sum(num_workers[:index]) for index in range(len(num_workers))]
    return [StreamPlace(first, world_size, packed_in_update) for first in firsts]


def before(weights: Weights, place: StreamPlace) -> Iterator[EngineCall]:
    """Join the group. Each publish makes its own: an engine that was started again has no place in an old one."""
    host, _, port = weights.location.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"{weights.transport} weights are at host:port, not {weights.location!r}")
    if not weights.manifest:
        raise InputError(f"{weights.transport} weights need a manifest: the names, dtypes and shapes in their order")
    init = {
        "master_address": host.strip("[]"),
        "master_port": int(port),
        "rank_offset": place.first_rank,
        "world_size": place.world_size,
    }
    if not place.packed_in_update:
        init["packed"] = True
    yield EngineCall("/init_weight_transfer_engine", {"init_info": init})


def during(weights: Weights, place: StreamPlace) -> Iterator[EngineCall]:
    """Receive the tensors while the trainer sends them, then leave the group."""
    names, dtypes, shapes = [list(column) for column in zip(*weights.manifest, strict=True)]
    update: dict[str, object] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    if place.packed_in_update:
        update["packed"] = True
    yield EngineCall("/start_weight_update")
    yield EngineCall("/update_weights", {"update_info": update})
    yield EngineCall("/finish_weight_update")
    yield EngineCall("/shutdown_weight_transfer_engine")
