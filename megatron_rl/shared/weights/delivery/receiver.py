"""A host's end of deliveries: it listens, and writes the versions that trainers send into a folder of its own.

It keeps two versions: the one that engines hold, and the one that arrives, which takes the files of an older one. A
version that is not complete is ended, and its lock released, if no sender has been connected for some time.
"""

import contextlib
import logging
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.weights.delivery.channel import Broken, Channel, FrameKind, accept
from megatron_rl.shared.weights.delivery.greetings import GREETING_SECONDS, PAUSE_SECONDS, Greetings, shut
from megatron_rl.shared.weights.delivery.incoming import Incoming, lay_out
from megatron_rl.shared.weights.delivery.messages import Begin, DeliveryError, Hello, Refused

_log = logging.getLogger(__name__)
_SILENT_SECONDS = 30.0
_LOOK_SECONDS = 0.5
# The greetings of all ranks of a run may come at once, each for a moment and in a thread of its own.
_MOST_GREETINGS, _MOST_GREETINGS_OF_ADDRESS = 1024, 256


class Receiver:
    """Receives versions in a folder, which must be this user's alone, from senders that know the token."""

    def __init__(self, folder: Path, token: str, host: str, port: int = 0, silent_seconds: float = _SILENT_SECONDS):
        """Listen at `host`, at a free port if it is 0. After `silent_seconds` without a sender, a version is ended."""
        self.folder = folder
        self._key = token.encode()
        self._silent_seconds = silent_seconds
        self._current: Incoming | None = None
        self._whole: Path | None = None
        """The folder of the last version that became complete before the current one."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connections: set[socket.socket] = set()
        self._greetings = Greetings(GREETING_SECONDS, _MOST_GREETINGS, _MOST_GREETINGS_OF_ADDRESS)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=512)
        self.port: int = self._listener.getsockname()[1]
        for work in (self._listen, self._look):
            threading.Thread(target=work, daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Describe the newest version, whose folder is `version-` and its number."""
        current = self._current
        if current is None:
            return {"version": None, "complete": False}
        return {
            "version": current.hello.version,
            "fingerprint": current.hello.fingerprint,
            "complete": current.is_complete,
            "ended": current.reason,
        }

    def close(self) -> None:
        """End all connections and what they bring; the files remain."""
        self._closed.set()
        shut(self._listener)
        self._listener.close()
        with self._lock:
            current, connections = self._current, list(self._connections)
        for connection in connections:
            shut(connection)
        if current is not None:
            current.end("the receiver was closed")

    def _listen(self) -> None:
        while not self._closed.is_set():
            if not self._greetings.make_room():
                self._closed.wait(PAUSE_SECONDS)
                continue
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                # The listener is closed, the connection ended early, or this process has too many files open.
                self._closed.wait(_LOOK_SECONDS)
                continue
            with self._lock:
                self._connections.add(connection)
            self._greetings.begin(connection, address)
            try:
                threading.Thread(target=self._serve, args=(connection, address), daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                # A sender connects again.
                _log.warning("a connection from %s is closed: %s", address, error)
                self._drop(connection)

    def _look(self) -> None:
        """End a version whose senders have all gone."""
        while not self._closed.wait(_LOOK_SECONDS):
            current = self._current
            if current is None or current.is_complete or current.reason is not None:
                continue
            if (seconds := current.seconds_alone()) > self._silent_seconds:
                _log.warning("version %d is ended: no sender for %.0f s", current.hello.version, seconds)
                current.end(f"no sender was connected for {seconds:.0f} s")

    def _drop(self, connection: socket.socket) -> None:
        self._greetings.end(connection.fileno())
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            hello, channel = accept(connection, self._key)
            self._greetings.end(connection.fileno())
            if hello.purpose == "control":
                self._control(hello, channel)
            else:
                self._take_stream(hello, channel)
        except Refused as refusal:
            _log.warning("a connection from %s is refused: %s", address, refusal)
        except (DeliveryError, OSError) as error:
            # The sender connects again.
            _log.debug("a connection from %s ended: %s", address, error)
        finally:
            self._drop(connection)

    def _control(self, hello: Hello, channel: Channel) -> None:
        """Begin a version, and tell the trainer what becomes of it."""
        frame = channel.receive()
        if frame.kind is not FrameKind.BEGIN:
            raise Refused(f"a frame of kind {frame.kind.name} came first")
        try:
            begin = msgspec.msgpack.decode(frame.payload, type=Begin)
            incoming = self._begin(hello, begin)
        except (MegatronRLError, OSError, msgspec.MsgspecError) as error:
            channel.send(FrameKind.REFUSED, payload=str(error).encode())
            raise Refused(str(error)) from None

        def tell(kind: FrameKind, text: str) -> None:
            # A trainer that has to connect again is told then.
            with contextlib.suppress(Broken):
                channel.send(kind, payload=text.encode())

        channel.send(FrameKind.BEGUN, incoming.number)
        with incoming.connected(channel, tell):
            incoming.forward(begin.children, self._key, begin.num_streams)
            incoming.tell_state(tell)
            frame = channel.receive()
            if frame.kind is FrameKind.GIVE_UP:
                incoming.end(frame.payload.decode())

    def _begin(self, hello: Hello, begin: Begin) -> Incoming:
        begin.contents.check()
        with self._lock:
            current = self._current
            if current is not None:
                _must_not_be_stale(hello, current)
                if _is_same(hello, begin, current):
                    return current
                current.end(f"version {hello.version} of {hello.sender} takes its place")
                if current.is_complete:
                    self._whole = current.folder
            if self._closed.is_set():
                raise Refused("the receiver is closed")
            self._current = None
            folder = self.folder / f"version-{hello.version}"
            self._current = lay_out(folder, hello, begin, self._find_spare(begin, folder))
            return self._current

    def _find_spare(self, begin: Begin, folder: Path) -> Path | None:
        """Return a folder whose files the version may take; remove all others but that of the last whole version."""
        spare: Path | None = None
        for path in [*self.folder.glob("version-*"), *self.folder.glob(".version-*")]:
            # A version of the same number takes the place of a former trainer's.
            if path == self._whole and path != folder:
                continue
            if spare is None and _has_files(path, begin):
                spare = path
            else:
                shutil.rmtree(path)
        return spare

    def _take_stream(self, hello: Hello, channel: Channel) -> None:
        incoming = self._current
        try:
            if incoming is None or _name(hello) != _name(incoming.hello):
                if incoming is not None:
                    _must_not_be_stale(hello, incoming)
                # A host that forwards may be told of a version before this one is.
                raise Broken(f"version {hello.version} has not begun here")
            if incoming.reason is not None:
                # The trainer may begin it from scratch.
                raise Broken(incoming.reason)
            with incoming.connected(channel):
                channel.send(FrameKind.HELD, payload=incoming.list_held())
                while True:
                    frame = channel.receive()
                    if frame.kind is not FrameKind.PORTION:
                        raise Refused(f"a frame of kind {frame.kind.name} came for a portion")
                    channel.send(incoming.take(channel, frame.value), frame.value)
        except Refused as refusal:
            channel.send(FrameKind.REFUSED, payload=str(refusal).encode())
            raise


def _name(hello: Hello) -> tuple[str, int, int, str]:
    return hello.run, hello.lease, hello.version, hello.fingerprint


def _must_not_be_stale(hello: Hello, current: Incoming) -> None:
    known = current.hello
    if hello.run == known.run and (hello.lease, hello.version) < (known.lease, known.version):
        raise Refused(
            f"version {hello.version} of {hello.run} under lease {hello.lease} is older than this host's, version "
            f"{known.version} under lease {known.lease}: a newer trainer or a newer version has taken its place"
        )


def _is_same(hello: Hello, begin: Begin, current: Incoming) -> bool:
    """Return whether a version is begun again, so that what has arrived of it counts."""
    return _name(hello) == _name(current.hello) and begin.contents == current.contents and current.reason is None


def _has_files(folder: Path, begin: Begin) -> bool:
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    if sizes != begin.contents.sizes:
        return False
    for name, header in begin.contents.headers.items():
        with open(folder / name, "rb") as file:
            if file.read(len(header)) != header:
                return False
    return True
