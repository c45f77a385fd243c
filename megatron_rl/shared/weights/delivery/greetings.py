"""Connections whose clients have not shown yet that they may be here, bounded in number and time.

Invariants:

- a connection that has waited for longer than the deadline is shut by the next `expire`;
- at a bound, of an address or of all, `make_room` shuts the connection that has waited longest, if it has sent nothing
  that waits to be read and has had a second to do so. If there is none, the caller accepts no connection for a moment:
  it waits in the kernel's queue. So neither clients that send nothing nor clients that all greet at once keep one out.
"""

import contextlib
import itertools
import resource
import select
import socket
import threading
import time
from typing import NamedTuple

GREETING_SECONDS = 10.0
"""The deadline of a greeting."""
PAUSE_SECONDS = 0.02
"""The time for which no connection is accepted after `make_room` has made none."""
_GRACE_SECONDS = 1.0
_ENOUGH_FILES = 1 << 16


class _Waiting(NamedTuple):
    connection: socket.socket
    address: str
    since: float


class Greetings:
    """The connections of a listening socket that wait for a greeting. Any thread may use it."""

    def __init__(self, seconds: float, most: int, most_of_address: int) -> None:
        self._seconds = seconds
        self._most = most
        self._most_of_address = most_of_address
        # By the descriptor, in the order of their beginning. The connection may be closed meanwhile, and its descriptor
        # another one's: that takes its place.
        self._waiting: dict[int, _Waiting] = {}
        self._num_of_address: dict[str, int] = {}
        # Only the address that came last may have reached its bound since there was room.
        self._last_address = ""
        self._lock = threading.Lock()

    def make_room(self) -> bool:
        """Shut a silent connection if a bound is reached; return whether there is room for another connection."""
        with self._lock:
            is_crowded = self._num_of_address.get(self._last_address, 0) >= self._most_of_address
            if not is_crowded and len(self._waiting) < self._most:
                return True
            start = time.monotonic() - _GRACE_SECONDS
            for descriptor, waiting in self._waiting.items():
                if is_crowded and waiting.address != self._last_address:
                    continue
                if waiting.connection.fileno() < 0 or (waiting.since < start and not _can_read(descriptor)):
                    self._shut(descriptor)
                    return True
            return False

    def begin(self, connection: socket.socket, address: str) -> None:
        """Note a new connection, for which there is room."""
        with self._lock:
            self._remove(connection.fileno())
            self._waiting[connection.fileno()] = _Waiting(connection, address, time.monotonic())
            self._num_of_address[address] = self._num_of_address.get(address, 0) + 1
            self._last_address = address

    def end(self, descriptor: int) -> None:
        """Note that the client of a connection has greeted, or that the connection is about to be closed."""
        with self._lock:
            self._remove(descriptor)

    def expire(self) -> None:
        """Shut the connections whose time is over."""
        with self._lock:
            end = time.monotonic() - self._seconds
            late = itertools.takewhile(lambda item: item[1].since < end, self._waiting.items())
            for descriptor in [descriptor for descriptor, _ in late]:
                self._shut(descriptor)

    def _shut(self, descriptor: int) -> None:
        connection = self._waiting[descriptor].connection
        self._remove(descriptor)
        shut(connection)

    def _remove(self, descriptor: int) -> None:
        if (waiting := self._waiting.pop(descriptor, None)) is not None:
            self._num_of_address[waiting.address] -= 1
            if not self._num_of_address[waiting.address]:
                del self._num_of_address[waiting.address]


def _can_read(descriptor: int) -> bool:
    """Return whether bytes, or the end, of a connection wait to be read."""
    # A socket with a timeout would wait in recv() even if it is told not to.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def shut(connection: socket.socket) -> None:
    """End a connection, if it has not ended by itself: threads that wait for it return."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def raise_file_limit() -> int:
    """Let this process have as many files open as it may and needs; return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Its children inherit the limit, and some programs look at each descriptor below it.
    enough = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft == resource.RLIM_INFINITY:
        return enough
    raised = max(soft, enough)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised
