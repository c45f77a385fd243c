"""Brings portions to one host over several streams, each portion once.

Invariants:

- the host says at each greeting which portions it holds, so a connection that is opened again resumes there. Portions
  that the host no longer holds, because it has begun the version from scratch, are sent again;
- a portion counts as sent once the host says that its code is right, and is sent again if it was wrong;
- the sender ends: with all portions sent, with the host's refusal, or when the host was silent for its patience.
"""

import collections
import threading
import time
from collections.abc import Callable, Iterable, Set

from megatron_rl.shared.weights.delivery.channel import Broken, Channel, Frame, FrameKind, Shipment
from megatron_rl.shared.weights.delivery.mapped import MappedFiles
from megatron_rl.shared.weights.delivery.messages import (
    Contents,
    DeliveryError,
    Refused,
    Target,
    unpack_numbers,
)

_MOST_UNANSWERED = 2
"""Portions that a stream sends before it waits for the first one's answer: the next travels while one is digested."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


Offer = Callable[[Iterable[int]], None]


class Supply:
    """The portions that may be sent: their bytes have been written, or have arrived, here."""

    def __init__(self, contents: Contents, writer: int | None = None):
        """Supply the portions of one writer, or of all."""
        self.numbers = tuple(
            number for number, portion in enumerate(contents.portions) if writer in (None, portion.writer)
        )
        self._ready: list[int] = []
        self._offers: list[Offer] = []
        self._lock = threading.Lock()
        self._missing: dict[str, int] = {}
        self._users: dict[str, list[int]] = {}
        self._num_unwritten: dict[int, int] = {}
        if writer is not None:
            self._count(contents)

    def subscribe(self, offer: Offer) -> None:
        """Offer all portions that are ready now or later."""
        with self._lock:
            self._offers.append(offer)
            ready = list(self._ready)
        offer(ready)

    def add(self, numbers: Iterable[int]) -> None:
        """Offer portions that have become ready."""
        with self._lock:
            new = list(numbers)
            self._ready += new
            offers = list(self._offers)
        for offer in offers:
            offer(new)

    def note(self, tensor: str, num_elements: int) -> None:
        """Note elements that the writer has written; a portion is ready once all of its tensors are written."""
        self._missing[tensor] -= num_elements
        if self._missing[tensor]:
            return
        ready = []
        for number in self._users[tensor]:
            self._num_unwritten[number] -= 1
            if not self._num_unwritten[number]:
                ready.append(number)
        self.add(ready)

    def _count(self, contents: Contents) -> None:
        for number in self.numbers:
            portion = contents.portions[number]
            self._num_unwritten[number] = len(portion.elements)
            for tensor, num_elements in portion.elements:
                name = contents.tensors[tensor]
                self._missing[name] = self._missing.get(name, 0) + num_elements
                self._users.setdefault(name, []).append(number)


class HostSender:
    """Sends a supply's portions to a host, from threads of its own."""

    def __init__(self, target: Target, shipment: Shipment, mapped: MappedFiles, supply: Supply):
        self.host = target.name
        self._target = target
        self._shipment = shipment
        self._mapped = mapped
        self._changed = threading.Condition()
        self._waiting: collections.deque[int] = collections.deque()
        self._numbers = frozenset(supply.numbers)
        self._missing = set(supply.numbers)
        self.failure: str | None = None
        """The reason why the sender gave up."""
        self._silent_since: float | None = None
        self._channels: set[Channel] = set()
        supply.subscribe(self._offer)
        num_streams = max(1, min(shipment.num_streams, len(self._missing)))
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(num_streams)]
        for thread in self._threads:
            thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the sender has ended; return False if it has not after some seconds."""
        with self._changed:
            return self._changed.wait_for(self._has_ended, seconds)

    def stop(self, reason: str) -> None:
        """Give up if anything is left, and return once no thread reads the files any more."""
        self._fail(reason)
        with self._changed:
            channels = list(self._channels)
        for channel in channels:
            channel.end()
        for thread in self._threads:
            thread.join()

    def _offer(self, numbers: Iterable[int]) -> None:
        with self._changed:
            self._waiting.extend(numbers)
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        return not self._missing or self.failure is not None

    def _fail(self, reason: str) -> None:
        with self._changed:
            if not self._has_ended():
                self.failure = reason
            self._changed.notify_all()
            channels = list(self._channels) if self.failure is not None else []
        for channel in channels:
            channel.end()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._has_ended():
            unanswered: collections.deque[int] = collections.deque()
            try:
                self._send_all(unanswered)
                return
            except Refused as refusal:
                self._fail(f"{self.host} refuses weights of {self._shipment.hello.sender}: {refusal}")
            except (DeliveryError, OSError) as error:
                self._offer(unanswered)
                silent = self._count_silent()
                if silent > self._shipment.patience:
                    self._fail(f"{self.host} was silent for {silent:.0f} s: {error}")
            with self._changed:
                self._changed.wait_for(self._has_ended, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _count_silent(self) -> float:
        """Count the seconds since the first connection broke without an answer after it."""
        with self._changed:
            if self._silent_since is None:
                self._silent_since = time.monotonic()
            return time.monotonic() - self._silent_since

    def _send_all(self, unanswered: collections.deque[int]) -> None:
        with self._changed:
            sent = self._numbers - self._missing
        channel = self._shipment.connect(self._target, "stream")
        with channel.connection:
            with self._changed:
                self._channels.add(channel)
            try:
                self._note_held(channel, sent)
                while (number := self._take(bool(unanswered))) is not None or unanswered:
                    if number is not None:
                        unanswered.append(number)
                        self._send(channel, number)
                    if number is None or len(unanswered) >= _MOST_UNANSWERED:
                        self._read_answer(channel, unanswered)
            finally:
                with self._changed:
                    self._channels.remove(channel)

    def _note_held(self, channel: Channel, sent: Set[int]) -> None:
        """Note what the host holds; `sent` are the portions that it had before this connection."""
        frame = _receive(channel)
        if frame.kind is not FrameKind.HELD:
            raise Broken(f"a frame of kind {frame.kind.name} came first")
        held = unpack_numbers(frame.payload, len(self._shipment.contents.portions))
        with self._changed:
            self._missing -= held
            gone = sent - held - self._missing
            self._missing |= gone
            self._waiting.extend(gone)
            self._silent_since = None
            self._changed.notify_all()

    def _take(self, is_awaiting: bool) -> int | None:
        """Take the next portion that the host lacks; None at the end, or if an answer may come before the next one."""
        with self._changed:
            while not self._has_ended():
                while self._waiting:
                    number = self._waiting.popleft()
                    if number in self._missing:
                        return number
                if is_awaiting:
                    return None
                self._changed.wait()
        return None

    def _send(self, channel: Channel, number: int) -> None:
        channel.send(FrameKind.PORTION, number)
        code = channel.begin_code()
        for block in self._mapped.read(self._shipment.contents.portions[number]):
            code.update(block)
            channel.send_bytes(block)
        channel.send(FrameKind.CODE, payload=code.digest())

    def _read_answer(self, channel: Channel, unanswered: collections.deque[int]) -> None:
        frame = _receive(channel)
        if frame.kind not in (FrameKind.TAKEN, FrameKind.AGAIN) or frame.value != unanswered[0]:
            raise Broken(f"the answer {frame.kind.name} {frame.value} came for portion {unanswered[0]}")
        number = unanswered.popleft()
        with self._changed:
            self._silent_since = None
            if frame.kind is FrameKind.TAKEN:
                self._missing.discard(number)
            else:
                self._waiting.append(number)
            self._changed.notify_all()


def _receive(channel: Channel) -> Frame:
    frame = channel.receive()
    if frame.kind is FrameKind.REFUSED:
        raise Refused(frame.payload.decode())
    return frame
