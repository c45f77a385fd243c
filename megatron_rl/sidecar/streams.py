"""The calls that have engines take weights which stream from the trainer's devices to theirs.

The trainer is rank 0 of one group. The workers of the engines follow, engine after engine. The sidecar tells the
engines to join and to receive, so the trainer needs no vLLM client that calls them.

vllm-ascend registers its HCCL backend under the same name and takes the same calls.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import STREAM_BUFFERS, StreamSource

RECEIVE = "/update_weights"
"""The call that ends when an engine has received all tensors."""


@dataclasses.dataclass(frozen=True)
class StreamPlace:
    """The ranks of an engine's workers in the group."""

    first_rank: int
    world_size: int
    """The size of the group: the trainer's rank 0 and all workers."""


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """A POST to an engine."""

    route: str
    content: dict[str, object] | None = None


def assign_places(num_workers: Sequence[int]) -> list[StreamPlace]:
    """Assign places to engines with these numbers of workers."""
    world_size = 1 + sum(num_workers)
    firsts = [1 + sum(num_workers[:index]) for index in range(len(num_workers))]
    return [StreamPlace(first, world_size) for first in firsts]


def split_address(source: StreamSource) -> tuple[str, int]:
    """Split the host:port at which a sender opens a group."""
    host, _, port = source.address.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"the location of {source.transport} weights must be host:port, not {source.address!r}")
    return host.strip("[]"), int(port)


def list_join_calls(source: StreamSource, place: StreamPlace) -> Iterator[EngineCall]:
    """Yield the calls that join the group.

    Each publish makes a new group, because a restarted engine does not belong to an old one.
    """
    host, port = split_address(source)
    if not source.manifest:
        raise InputError(f"{source.transport} weights must have a manifest: names, dtypes and shapes in their order")
    init: dict[str, object] = {
        "master_address": host,
        "master_port": port,
        "rank_offset": place.first_rank,
        "world_size": place.world_size,
    }
    if not _is_packed_by_update(source):
        init |= STREAM_BUFFERS
    yield EngineCall("/init_weight_transfer_engine", {"init_info": init})


def list_receive_calls(source: StreamSource) -> Iterator[EngineCall]:
    """Yield the calls that receive the tensors while the trainer sends them, and then leave the group."""
    names, dtypes, shapes = [list(column) for column in zip(*source.manifest, strict=True)]
    update: dict[str, object] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    if _is_packed_by_update(source):
        update["packed"] = True
    yield EngineCall("/start_weight_update")
    yield EngineCall(RECEIVE, {"update_info": update})
    yield EngineCall("/finish_weight_update")
    yield EngineCall("/shutdown_weight_transfer_engine")


def _is_packed_by_update(source: StreamSource) -> bool:
    """Check whether engines are told with each update that tensors are packed (vllm-ascend), or with the group."""
    return source.transport == "hccl"
