"""Connections whose clients have not shown yet that they may be here, bounded in number and time.

Invariants:

- a connection that has waited for longer than the deadline is shut by the next `expire`;
- beyond a bound, of an address or of all, the connection that has waited longest is shut. A client that greets at once
  needs its place for a moment, and so clients that say nothing do not keep it out.
"""

import contextlib
import itertools
import resource
import socket
import threading
import time
from typing import NamedTuple

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
        self._lock = threading.Lock()

    def begin(self, connection: socket.socket, address: str) -> None:
        """Note a new connection; shut those that have waited longest, if there are too many."""
        with self._lock:
            self._remove(connection.fileno())
            self._waiting[connection.fileno()] = _Waiting(connection, address, time.monotonic())
            self._num_of_address[address] = self._num_of_address.get(address, 0) + 1
            if self._num_of_address[address] > self._most_of_address:
                self._shut(next(number for number, waiting in self._waiting.items() if waiting.address == address))
            elif len(self._waiting) > self._most:
                self._shut(next(iter(self._waiting)))

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


def shut(connection: socket.socket) -> None:
    """End a connection, if it has not ended by itself: threads that wait for it return."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def raise_file_limit() -> int:
    """Let this process have as many files open as it may and needs; return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Its children inherit the limit, and some programs look at each descriptor below it.
    raised = max(soft, min(hard, _ENOUGH_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return raised
