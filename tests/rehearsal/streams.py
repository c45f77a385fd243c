"""The emulated device's streams and events, and the check that uses of memory by several streams are ordered by events.

Every operation runs at once, in the order of the host. The orders that a device could choose are derived from clocks:
each stream counts its operations, and knows how far it has waited for each other stream. Two uses of the same memory,
one of them a write, must be ordered by these clocks. So must a block's last uses and the first allocation that could
reuse it.

Copies that do not block are the exception: they land as late as a device may let them, at the next use or wait.
"""

import collections
import contextlib
import dataclasses
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

Clock = dict[int, int]

# Faults and host syncs name a line of the first of these packages that is found; all pass through these modules.
_PACKAGES = ("megatron_rl", "megatron", "tests", "torch")
_OWN = {"tests.rehearsal.streams", "tests.rehearsal.device", "tests.rehearsal.syncs"}


class DeviceFault(AssertionError):
    """A fault that a device would have, though it may go well most of the time."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One operation on a block."""

    stream: int
    number: int
    """The operation's number on its stream."""
    what: str
    where: str

    def is_before(self, clock: Clock) -> bool:
        """Check whether a stream or the host with this clock has waited for the use."""
        return clock.get(self.stream, 0) >= self.number


@dataclasses.dataclass
class Remains:
    """The remains of a block after its end."""

    owner: int
    """The stream whose allocations may use the memory again."""
    num_bytes: int
    last: dict[int, Use] = dataclasses.field(default_factory=dict)
    """The last use on each stream."""
    may_outlive: set[int] = dataclasses.field(default_factory=set)
    """Streams that `record_stream` was called with: the allocator itself waits for these."""


class Block:
    """Memory of the device, which tensors share that are views of each other; it is freed with the last of them."""

    def __init__(self, num_bytes: int, where: str) -> None:
        self.late: LateCopy | None = None
        self.reads: dict[int, Use] = {}
        """Reads since the last write, by stream."""
        self.write = state.allocate(num_bytes, where)
        self.remains = Remains(self.write.stream, num_bytes)
        weakref.finalize(self, state.gone.append, self.remains).atexit = False


@dataclasses.dataclass
class LateCopy:
    """A copy that was queued and has not been waited for."""

    use: Use
    land: Callable[[], object]


class State:
    """All streams of the device."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        self._waiting: list[LateCopy] = []
        self.gone: collections.deque[Remains] = collections.deque()
        """Records of freed blocks; finalizers, which run at any time, append to them."""
        self._freed: list[Remains] = []
        self.host: Clock = {}
        self.clocks: dict[int, Clock] = {0: {}}
        self.faults: list[str] = []
        """All faults that were raised: a caller may have caught one."""
        self._allocated = self._peak = 0

    def current(self) -> "Stream":
        """Return this thread's stream."""
        return getattr(self._thread, "stream", DEFAULT)

    @contextlib.contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        """Send this thread's operations to the stream."""
        before, self._thread.stream = self.current(), stream
        try:
            yield
        finally:
            self._thread.stream = before

    def set_current(self, stream: "Stream") -> None:
        self._thread.stream = stream

    def new_stream(self) -> int:
        with self._lock:
            number = next(self._numbers)
            self.clocks[number] = dict(self.host)
            return number

    def operate(self, what: str, where: str, reads: list[Block], writes: list[Block]) -> Use:
        """Count an operation on this thread's stream, and check it against the other uses of its blocks."""
        with self._lock:
            stream = self.current().number
            clock = self.clocks[stream]
            use = Use(stream, clock.get(stream, 0) + 1, what, where)
            clock[stream] = use.number
            for block in (*reads, *writes):
                self._check(block.write, use, clock)
                self._land([block.late] if block.late else [])
                block.late = None
                block.remains.last[stream] = use
            for block in writes:
                for read in block.reads.values():
                    self._check(read, use, clock)
                block.write = use
                block.reads = {}
            for block in reads:
                block.reads[stream] = use
            return use

    def queue_copy(self, use: Use, block: Block | None, land: Callable[[], object]) -> None:
        """Let a copy land when its block is next used, if it has one, or when its stream is waited for."""
        with self._lock:
            copy = LateCopy(use, land)
            self._waiting.append(copy)
            if block is not None:
                block.late = copy

    def allocate(self, num_bytes: int, where: str) -> Use:
        """Count new memory, which may be that of any freed block of this stream."""
        with self._lock:
            stream = self.current().number
            clock = self.clocks[stream]
            use = Use(stream, clock.get(stream, 0), "allocation", where)
            self._allocated = self.allocated + num_bytes
            self._peak = max(self._peak, self._allocated)
            own = [block for block in self._freed if block.owner == stream]
            self._freed = [block for block in self._freed if block.owner != stream]
            for block in own:
                for other in block.last.values():
                    if other.stream not in block.may_outlive:
                        self._check(other, use, clock, "memory is used again while a stream still uses it")
            return use

    @property
    def allocated(self) -> int:
        """The bytes of all blocks."""
        with self._lock:
            while self.gone:
                self._freed.append(self.gone.popleft())
                self._allocated -= self._freed[-1].num_bytes
            return self._allocated

    @property
    def peak(self) -> int:
        """The most bytes allocated since `reset_peak`."""
        return self._peak

    def reset_peak(self) -> None:
        self._peak = self.allocated

    def wait(self, stream: int, clock: Clock) -> None:
        """Let later operations on a stream come after everything that the clock knows."""
        with self._lock:
            _advance(self.clocks[stream], clock)

    def wait_on_host(self, clock: Clock) -> None:
        """Let later operations on all streams come after the clock, and land the copies that have finished."""
        with self._lock:
            for one in (self.host, *self.clocks.values()):
                _advance(one, clock)
            self._land([copy for copy in self._waiting if copy.use.is_before(self.host)])

    def wait_for_all(self) -> None:
        """Wait on the host for everything that is queued."""
        with self._lock:
            for number in list(self.clocks):
                self.wait_on_host(self.clocks[number])

    def fault(self, text: str) -> None:
        self.faults.append(text)
        raise DeviceFault(text)

    def _check(self, earlier: Use, later: Use, clock: Clock, what: str = "two streams, and no event between") -> None:
        if not earlier.is_before(clock):
            self.fault(
                f"{what}: {later.what} on stream {later.stream} ({later.where}) after {earlier.what} on stream "
                f"{earlier.stream} ({earlier.where})"
            )

    def _land(self, copies: list[LateCopy]) -> None:
        for copy in copies:
            if copy in self._waiting:
                self._waiting.remove(copy)
                copy.land()


def _advance(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


class Stream:
    """A queue of operations; it takes what torch.cuda.Stream takes."""

    def __init__(self, *arguments: Any, number: int | None = None, **keywords: Any) -> None:
        self.number = state.new_stream() if number is None else number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    @property
    def cuda_stream(self) -> int:
        return self.number

    @property
    def device(self) -> torch.device:
        return torch.device("npu:0")

    def wait_event(self, event: "Event") -> None:
        if event.clock is not None:
            state.wait(self.number, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        state.wait(self.number, dict(state.clocks[stream.number]))

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        state.wait_on_host(state.clocks[self.number])

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        self._before = state.current()
        state.set_current(self)
        return self

    def __exit__(self, *error: object) -> None:
        state.set_current(self._before)


class Event:
    """A marker in a queue; it takes what torch.cuda.Event takes."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict(state.clocks[(stream or state.current()).number])

    def wait(self, stream: Stream | None = None) -> None:
        (stream or state.current()).wait_event(self)

    def synchronize(self) -> None:
        if self.clock is not None:
            state.wait_on_host(self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        return 0.0


def locate() -> str:
    """Find the package's line that runs now, and the line of megatron that it has called; else a test's line."""
    found: dict[str, str] = {}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and "megatron_rl" not in found:
        place = frame.f_globals
        _, package, name = _modules.get(id(place)) or _find_module(place)
        if package and package not in found:
            found[package] = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    product = [found[package] for package in ("megatron_rl", "megatron") if package in found]
    return " > ".join(product) or found.get("tests") or found.get("torch", "nowhere")


# Every operation asks for the modules of its frames. The names of modules stay alive here, and so keep their numbers.
_modules: dict[int, tuple[dict[str, Any], str, str]] = {}


def _find_module(place: dict[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return the names of a module, its package if that is among those that are named, and its own name."""
    name = place.get("__name__", "")
    package = name.split(".")[0]
    known = (place, package if package in _PACKAGES and name not in _OWN else "", name)
    return _modules.setdefault(id(place), known)


state = State()
DEFAULT = Stream(number=0)
