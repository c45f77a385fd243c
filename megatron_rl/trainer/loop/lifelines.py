"""A connection between rank 0 and every other rank, for as long as their processes live.

However a process ends, the kernel closes its connections, and keepalive breaks those to a host that is lost. So the
loss of a rank is noticed within NOTICED_SECONDS. A rank that is only slow, or stopped, keeps its connections. This
needs only the standard library, so that it works before the imports that take seconds.

Each end first says which rank it is. A process that does not is a stranger: rank 0 does not answer it. If a stranger
listens at rank 0's address, the other ranks disconnect and try again until rank 0 listens.
"""

import abc
import contextlib
import json
import os
import selectors
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

# Seconds of silence before the first keepalive probe, seconds between probes, and probes without an answer.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 4}
# Seconds until the loss of a peer is noticed if it could not close its connection: its host or the network is lost.
NOTICED_SECONDS = _KEEPALIVE[socket.TCP_KEEPIDLE] + (_KEEPALIVE[socket.TCP_KEEPINTVL] * _KEEPALIVE[socket.TCP_KEEPCNT])
_POLL_SECONDS = 0.1
_MOST_BYTES = 1 << 20

Message = list[Any]


class Peer(Protocol):
    """Hears the other ranks; called from the connections' thread."""

    def receive(self, message: Message) -> None:
        """Receive a message from a rank."""
        ...

    def lost(self, rank: int) -> None:
        """Learn that the connection to a rank broke; the rank may have said before that it is done."""
        ...


class Lines(abc.ABC):
    """One rank's end of its connections: the messages that it tells, in one order for all of them."""

    def __init__(self, peer: Peer, told: Sequence[Message] = ()) -> None:
        self._peer = peer
        self._told: list[Message] = list(told)
        self._lock = threading.Lock()
        self._all_there = threading.Event()
        self._closed = threading.Event()

    def tell(self, *message: Any) -> None:
        """Send the message to all connected ranks, and to those that connect later."""
        with self._lock:
            self._told.append(list(message))
            self._send(list(message))

    def mention(self, *message: Any) -> None:
        """Send the message to all connected ranks, and to no others."""
        with self._lock:
            self._send(list(message))

    def wait_until_told(self, seconds: float) -> bool:
        """Wait at most `seconds` until all ranks are connected; return whether they are."""
        return self._all_there.wait(seconds)

    @property
    @abc.abstractmethod
    def missing(self) -> list[int]:
        """The expected ranks that have never connected."""

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def _send(self, message: Message) -> None:
        """Send a message over each connection whose other end is known; the lock is held."""


class Hub(Lines):
    """Rank 0's end of all connections."""

    def __init__(self, listener: socket.socket, num_others: int, peer: Peer) -> None:
        super().__init__(peer)
        self._listener = listener
        self._never_there = set(range(1, num_others + 1))
        self._lines: dict[_Connection, int | None] = {}
        listener.setblocking(False)
        os.register_at_fork(after_in_child=listener.close)
        threading.Thread(target=self._listen, name="lifelines", daemon=True).start()

    @property
    def missing(self) -> list[int]:
        return sorted(self._never_there)

    def close(self) -> None:
        self._closed.set()

    def _send(self, message: Message) -> None:
        for line, rank in self._lines.items():
            if rank is not None:
                line.send(message)

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._closed.is_set():
                for key, _ in selector.select(_POLL_SECONDS):
                    if key.data is None:
                        self._accept(selector)
                    elif not self._read(key.data):
                        selector.unregister(key.fileobj)
                        self._lose(key.data)
            for line in self._lines:
                line.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            line = _Connection(connection)
            with self._lock:
                self._lines[line] = None
            selector.register(connection, selectors.EVENT_READ, line)

    def _read(self, line: "_Connection") -> bool:
        """Pass on the messages that arrived; return False if the connection ended, or a stranger made it."""
        messages = line.receive()
        for message in messages or ():
            if self._lines[line] is not None:
                self._peer.receive(message)
            elif (rank := _read_greeting(message)) is not None:
                self._welcome(line, rank)
            else:
                return False
        return messages is not None

    def _welcome(self, line: "_Connection", rank: int) -> None:
        with self._lock:
            self._lines[line] = rank
            self._never_there.discard(rank)
            for message in [_greet(0), *self._told]:
                line.send(message)
            if not self._never_there:
                self._all_there.set()

    def _lose(self, line: "_Connection") -> None:
        line.close()
        with self._lock:
            rank = self._lines.pop(line)
        # A stranger made a connection that never named a rank.
        if rank is not None and not self._closed.is_set():
            self._peer.lost(rank)


class Spoke(Lines):
    """Another rank's end of its connection to rank 0, which may not listen yet."""

    def __init__(self, host: str, port: int, rank: int, peer: Peer) -> None:
        super().__init__(peer, [_greet(rank)])
        self._address = host, port
        self._line: _Connection | None = None
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()

    @property
    def missing(self) -> list[int]:
        return [] if self._all_there.is_set() else [0]

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._line is not None:
                self._line.close()

    def _send(self, message: Message) -> None:
        if self._line is not None:
            self._line.send(message)

    def _listen(self) -> None:
        while not self._closed.is_set():
            line = self._connect()
            if line is not None:
                self._follow(line)
            if self._all_there.is_set() and not self._closed.is_set():
                self._peer.lost(0)
                return
            # No process that listens there said that it is rank 0.
            self._closed.wait(_POLL_SECONDS)

    def _follow(self, line: "_Connection") -> None:
        """Pass on rank 0's messages until the connection ends, or shows that it is not rank 0's."""
        while not self._closed.is_set() and (messages := line.receive()) is not None:
            for message in messages:
                if self._all_there.is_set():
                    self._peer.receive(message)
                elif _read_greeting(message) == 0:
                    self._all_there.set()
                else:
                    line.close()
                    return

    def _connect(self) -> "_Connection | None":
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                connection = socket.create_connection(self._address, timeout=NOTICED_SECONDS)
                # On one host, connecting to a port on which no process listens may connect the socket to itself.
                if connection.getsockname() != connection.getpeername():
                    return self._begin(connection)
                connection.close()
            self._closed.wait(_POLL_SECONDS)
        return None

    def _begin(self, connection: socket.socket) -> "_Connection":
        connection.settimeout(None)
        with self._lock:
            self._line = _Connection(connection)
            for message in self._told:
                self._line.send(message)
        return self._line


def _greet(rank: int) -> Message:
    return ["rank", rank]


def _read_greeting(message: Message) -> int | None:
    """Return the rank that greets with this message; None if it is not a greeting."""
    match message:
        case ["rank", int(rank)]:
            return rank
    return None


class _Connection:
    """One end of a connection: messages, each a line of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # Data that is never acknowledged breaks the connection, as silence does.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * NOTICED_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A forked process would keep the connection open after this one ends.
        os.register_at_fork(after_in_child=connection.close)
        self._connection = connection
        self._unfinished = b""

    def send(self, message: Message) -> None:
        """Send the message; `receive` notices the loss of the peer."""
        with contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Return the other end's next messages; None if the connection broke, or brought anything else."""
        try:
            data = self._connection.recv(1 << 16)
            *lines, self._unfinished = (self._unfinished + data).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        is_language = all(isinstance(message, list) and message for message in messages)
        return messages if data and is_language and len(self._unfinished) < _MOST_BYTES else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that the other ranks reach at `host`, on that address alone if this host knows it."""
    try:
        return socket.create_server((_bound(host), port))
    except OSError:
        # Only the others know this machine as `host`: it cannot tell which of its addresses they reach.
        return socket.create_server(("", port))


def _bound(host: str) -> str:
    """Return the address to listen on; "" means all, if `host` is the loopback here and other hosts must reach it."""
    address = socket.gethostbyname(host)
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "" if address.startswith("127.") and not is_alone else address
