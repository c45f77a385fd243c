"""The relay of an iteration's slots from the one rank of a replica that fetches them to all ranks of the replica.

The fetching rank sends each slot's bytes as they come, undecoded, and announces the end.
Invariants:

- a group of its own carries the slots, and one thread of each rank uses it, so that no collective of the schedule comes
  between them;
- receiving ranks are always ready to receive: the fetching rank waits for their threads, never for their computations;
- the fetching rank asks for a slot no later than any other rank needs it. It belongs to the first pipeline stage, whose
  forward pass of a micro-batch comes before those of all other stages. So a schedule that would end if every rank
  fetched its own slots also ends with the relay;
- a refusal of the sidecar is raised on every rank with the same text.
"""

import contextlib
import pickle
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_rl.errors import MegatronRLError
from megatron_rl.trainer.mcore.session import ReplicaGroup

# A rank that fails tells all ranks why, and they end (`trainer/loop/watch.py`). The wait lets that reason come first.
_REASON_SECONDS = 60.0


class SlotsLost(RuntimeError):
    """Another rank of the replica has ended, or has left the iteration; that rank reports why."""


class Relay(Protocol):
    """One rank's end of the relay in an iteration. One thread makes all calls."""

    def fetch(self, ask: Callable[[], bytes]) -> bytes:
        """Return the next slot, which `ask` gets from the sidecar."""
        ...

    def leave(self) -> None:
        """Take no more slots, and return when the fetching rank has left too."""
        ...


class _Kind(IntEnum):
    SLOT = 0
    FAILURE = 1
    END = 2


class LoneRank:
    def fetch(self, ask: Callable[[], bytes]) -> bytes:
        return ask()

    def leave(self) -> None:
        pass


class FetchingRank:
    """The rank that asks the sidecar, and sends the answers to the others."""

    def __init__(self, group: ReplicaGroup):
        self._group = group
        self._has_ended = False

    def fetch(self, ask: Callable[[], bytes]) -> bytes:
        try:
            data = ask()
        except MegatronRLError as error:
            self._end(_Kind.FAILURE, pickle.dumps((type(error), str(error))))
            raise
        except BaseException:
            self._end(_Kind.END)
            raise
        try:
            self._send(_Kind.SLOT, data)
        except RuntimeError as error:
            self._has_ended = True
            raise _wait_for_the_reason("takes no more slots") from error
        return data

    def leave(self) -> None:
        self._end(_Kind.END)

    def _end(self, kind: _Kind, data: bytes = b"") -> None:
        if self._has_ended:
            return
        self._has_ended = True
        # A rank that has ended need not be told.
        with contextlib.suppress(RuntimeError):
            self._send(kind, data)

    def _send(self, kind: _Kind, data: bytes) -> None:
        source, group = self._group.first, self._group.group
        dist.broadcast(torch.tensor([kind, len(data)]), source, group)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), source, group)


class ReceivingRank:
    """A rank that receives slots from the fetching rank."""

    def __init__(self, group: ReplicaGroup):
        self._group = group
        self._has_ended = False

    def fetch(self, ask: Callable[[], bytes]) -> bytes:
        try:
            kind, data = self._receive()
        except RuntimeError as error:
            raise _wait_for_the_reason("has ended") from error
        if kind == _Kind.FAILURE:
            failure, text = pickle.loads(data)
            raise failure(text)
        if kind == _Kind.END:
            raise _wait_for_the_reason("left the iteration")
        return data

    def leave(self) -> None:
        # The fetching rank may have ended without a message. This rank needs no more slots, so that is not an error.
        with contextlib.suppress(RuntimeError):
            while not self._has_ended:
                self._receive()

    def _receive(self) -> tuple[int, bytes]:
        # Only a slot is followed by another message.
        has_ended, self._has_ended = self._has_ended, True
        assert not has_ended, "the fetching rank sends no more"
        source, group = self._group.first, self._group.group
        header = torch.empty(2, dtype=torch.int64)
        dist.broadcast(header, source, group)
        kind, length = header.tolist()
        data = torch.empty(length, dtype=torch.uint8)
        if length:
            dist.broadcast(data, source, group)
        self._has_ended = kind != _Kind.SLOT
        return kind, data.numpy().tobytes()


def open_relay(group: ReplicaGroup | None, rank: int) -> Relay:
    """Open this rank's relay for an iteration; `group` is its replica's, or None for a replica of one rank."""
    if group is None:
        return LoneRank()
    return FetchingRank(group) if rank == group.first else ReceivingRank(group)


def _wait_for_the_reason(what: str) -> SlotsLost:
    time.sleep(_REASON_SECONDS)
    return SlotsLost(f"a rank of this replica {what}, and has not reported why for {_REASON_SECONDS:g} s")
