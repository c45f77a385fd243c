"""The places where the host waits for the device: each stalls the queue that a fast trainer keeps full."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterator

from tests.rehearsal.streams import locate, state

# Operations whose result's shape or value the host needs before it continues.
READ_BY_HOST = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::bincount",
}


@dataclasses.dataclass(frozen=True)
class Sync:
    """One wait of the host."""

    what: str
    where: str
    thread: str


@dataclasses.dataclass(frozen=True)
class Copy:
    """One copy from the host to the device."""

    num_bytes: int
    is_pinned: bool
    """Whether the host's memory is pinned, so that the host need not wait."""
    where: str
    thread: str


class Log:
    """All waits since the process began, and all copies to the device."""

    def __init__(self) -> None:
        self.all: list[Sync] = []
        self.copies: list[Copy] = []

    def add_copy(self, num_bytes: int, is_pinned: bool) -> None:
        """Note a copy to the device."""
        self.copies.append(Copy(num_bytes, is_pinned, locate(), threading.current_thread().name))

    def add(self, what: str) -> None:
        """Note that the host waits for this thread's stream, and have it wait."""
        self.all.append(Sync(what, locate(), threading.current_thread().name))
        state.current().synchronize()

    @contextlib.contextmanager
    def during(self) -> Iterator[list[Sync]]:
        """Collect the waits that are recorded inside."""
        found: list[Sync] = []
        first = len(self.all)
        yield found
        found += self.all[first:]


def describe(syncs: list[Sync]) -> str:
    """Return a line for each place."""
    counted = collections.Counter(syncs)
    return "\n".join(f"{count} x {sync.what} at {sync.where} in {sync.thread}" for sync, count in counted.items())


log = Log()
