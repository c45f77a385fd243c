"""One version on a host that receives it: what has arrived, and what becomes of it.

Invariants:

- a portion is counted once, after all of its bytes have been written and had their code;
- the folder's lock is held until every portion is counted, or the version is ended for a reason;
- once `end` has returned, no thread writes into the files or reads them.
"""

import collections
import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.shared.weights import folders
from megatron_rl.shared.weights.delivery.channel import Broken, Channel, FrameKind, Shipment
from megatron_rl.shared.weights.delivery.mapped import BLOCK_BYTES, MappedFiles
from megatron_rl.shared.weights.delivery.messages import Begin, Contents, Hello, Portion, Refused, Target, pack_numbers
from megatron_rl.shared.weights.delivery.sender import HostSender, Supply
from megatron_rl.shared.weights.folders import DIGESTS_FILE, Counter, create, put_in_place
from megatron_rl.shared.weights.mapping import TensorSpec

_CHILD_PATIENCE_SECONDS = 20.0
_MOST_ATTEMPTS = 5
Tell = Callable[[FrameKind, str], None]
"""A function that learns that the version is complete, that it has ended, or that a child is cut off."""


class Incoming:
    """A version that arrives in a folder whose files are laid out."""

    def __init__(self, folder: Path, hello: Hello, contents: Contents, opened: contextlib.ExitStack):
        """Hold the folder's lock, which is in `opened`, until the version is complete or has ended."""
        self.folder, self.hello, self.contents = folder, hello, contents
        self.number = secrets.randbits(63)
        """A number of its own, by which the trainer finds that the version was begun from scratch."""
        self._opened = opened
        self._mapped = MappedFiles(folder, contents.files, is_written=True)
        specs = [TensorSpec(name, (), "") for name in contents.tensors]
        self._counters = [
            opened.enter_context(Counter(folder, specs, writer, contents.num_writers))
            for writer in range(contents.num_writers)
        ]
        self._held = [False] * len(contents.portions)
        self._num_missing = len(self._held)
        self._changed = threading.Condition()
        self._num_wrong: collections.Counter[int] = collections.Counter()
        self._claims: dict[int, Channel] = {}
        self._open: set[Channel] = set()
        self._last_open = time.monotonic()
        self._tells: dict[Channel, Tell] = {}
        self._supply = Supply(contents)
        self._children: dict[str, HostSender] = {}
        self._forwarding = threading.Lock()
        self.reason: str | None = None
        """The reason why the version will not be completed here."""

    @property
    def is_complete(self) -> bool:
        return not self._num_missing

    @contextlib.contextmanager
    def connected(self, channel: Channel, tell: Tell | None = None) -> Iterator[None]:
        """Note a connection while it is open; tell it what becomes of the version."""
        with self._changed:
            self._open.add(channel)
            if tell is not None:
                self._tells[channel] = tell
        try:
            yield
        finally:
            with self._changed:
                self._open.discard(channel)
                self._tells.pop(channel, None)
                self._last_open = time.monotonic()

    def tell_state(self, tell: Tell) -> None:
        """Tell what has become of the version and of children until now."""
        if self.is_complete:
            tell(FrameKind.FINISHED, "")
        elif self.reason is not None:
            tell(FrameKind.ENDED, self.reason)
        for sender in list(self._children.values()):
            if sender.failure is not None:
                tell(FrameKind.CUT_OFF, sender.host)

    def seconds_alone(self) -> float:
        """Return for how long no connection has been open."""
        with self._changed:
            return 0.0 if self._open else time.monotonic() - self._last_open

    def list_held(self) -> bytes:
        """Return the numbers of the portions that have arrived."""
        with self._changed:
            return pack_numbers(self._held)

    def take(self, channel: Channel, number: int) -> FrameKind:
        """Receive a portion; return the answer to its sender."""
        if not 0 <= number < len(self._held):
            raise Refused(f"portion {number} does not exist")
        is_held = self._claim(channel, number)
        try:
            portion = self.contents.portions[number]
            code = self._receive(channel, portion, is_dropped=is_held)
            frame = channel.receive()
            if frame.kind is not FrameKind.CODE:
                raise Broken(f"a frame of kind {frame.kind.name} came for a code")
            if not hmac.compare_digest(code, frame.payload):
                self._note_wrong(number, portion, channel)
                return FrameKind.AGAIN
            if not is_held:
                self._count(number, portion)
            return FrameKind.TAKEN
        finally:
            with self._changed:
                del self._claims[number]
                self._changed.notify_all()

    def forward(self, children: Sequence[Target], key: bytes, num_streams: int) -> None:
        """Forward to these hosts what has arrived and what will."""
        hello = msgspec.structs.replace(self.hello, sender="another host")
        shipment = Shipment(hello, key, self.contents, num_streams, _CHILD_PATIENCE_SECONDS)
        with self._forwarding:
            self._stop_forwarding("it is begun again")
            for child in children if self.reason is None else ():
                sender = HostSender(child, shipment, self._mapped, self._supply)
                self._children[child.name] = sender
                threading.Thread(target=self._watch, args=(sender,), daemon=True).start()

    def end(self, reason: str) -> None:
        """End the version: if it is not complete, it never will be."""
        self._break_off(reason)
        with self._changed:
            channels = list(self._claims.values())
        with self._forwarding:
            self._stop_forwarding(reason)
        for channel in channels:
            channel.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._claims)

    def _stop_forwarding(self, reason: str) -> None:
        # A sender that is stopped here has not failed, and its child is not cut off.
        senders, self._children = list(self._children.values()), {}
        for sender in senders:
            sender.stop(reason)

    def _break_off(self, reason: str) -> None:
        with self._changed:
            if self.is_complete or self.reason is not None:
                return
            self.reason = reason
            self._opened.close()
            tells = list(self._tells.values())
        for tell in tells:
            tell(FrameKind.ENDED, reason)

    def _note_wrong(self, number: int, portion: Portion, channel: Channel) -> None:
        """Note a portion whose code is wrong; after several times the version is ended."""
        self._num_wrong[number] += 1
        if self._num_wrong[number] >= _MOST_ATTEMPTS:
            sender, _ = channel.connection.getpeername()[:2]
            reason = (
                f"a part of {self.contents.files[portion.file].name} arrived corrupted {_MOST_ATTEMPTS} times from "
                f"{sender}: check the network between them"
            )
            self._break_off(reason)
            raise Refused(reason)

    def _claim(self, channel: Channel, number: int) -> bool:
        """Take a portion over from a connection that is sending it, since a sender repeats what broke off."""
        with self._changed:
            while (former := self._claims.get(number)) is not None:
                former.end()
                self._changed.wait()
            if self.reason is not None:
                raise Refused(self.reason)
            self._claims[number] = channel
            return self._held[number]

    def _receive(self, channel: Channel, portion: Portion, is_dropped: bool) -> bytes:
        """Receive a portion's bytes and return their code."""
        code = channel.begin_code()

        def receive(target: memoryview) -> None:
            channel.receive_into(target)
            code.update(target)

        if is_dropped:
            scratch = np.empty(min(BLOCK_BYTES, portion.num_bytes), np.uint8).data
            for start in range(0, portion.num_bytes, BLOCK_BYTES):
                receive(scratch[: portion.num_bytes - start])
        else:
            self._mapped.fill(portion, receive)
        return code.digest()

    def _count(self, number: int, portion: Portion) -> None:
        with self._changed:
            if self.reason is not None:
                raise Refused(self.reason)
            for tensor, num_elements in portion.elements:
                self._counters[portion.writer].add(self.contents.tensors[tensor], num_elements)
            self._held[number] = True
            self._num_missing -= 1
            if self.is_complete:
                self._opened.close()
            tells = list(self._tells.values()) if self.is_complete else []
        self._supply.add([number])
        for tell in tells:
            tell(FrameKind.FINISHED, "")

    def _watch(self, sender: HostSender) -> None:
        sender.wait()
        if sender.failure is not None:
            with self._changed:
                tells = list(self._tells.values()) if self._children.get(sender.host) is sender else []
            for tell in tells:
                tell(FrameKind.CUT_OFF, sender.host)


def lay_out(folder: Path, hello: Hello, begin: Begin, spare: Path | None) -> Incoming:
    """Lay out a version's folder, or take the files of an older version of the same contents for it."""
    staged = folder.with_name(f".{folder.name}.partial")
    opened = contextlib.ExitStack()
    try:
        if spare is not None:
            spare.rename(staged)
        else:
            create(staged, begin.contents, private=True)
        path = staged / DIGESTS_FILE
        path.touch(mode=0o600)
        path.write_bytes(begin.digests)
        opened.enter_context(folders.writing(staged, len(begin.contents.tensors), begin.contents.num_writers))
        put_in_place(staged, folder)
        return Incoming(folder, hello, begin.contents, opened)
    except BaseException:
        opened.close()
        raise
