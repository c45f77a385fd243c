"""Counts the time of an iteration by its parts."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from megatron_rl.observe.trace import MAIN, Recorder

WHOLE = "iteration"
REST = "other"
# The time before the first iteration, which belongs to none.
START = "start"


class Timeline:
    """Seconds by the name of a span, each moment counted once.

    Invariant: a moment belongs to the innermost open span, or to "other", so the parts of an iteration add up to the
    whole. Only one thread may use it; others may read its place.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, recorder: Recorder | None = None) -> None:
        """Start counting. `recorder` also gets every span, and must have the same clock."""
        self._clock = clock
        self._recorder = recorder
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._begin = self._since = clock()
        self._start: float | None = None
        self.place = (0, REST)
        """The number of begins and ends of spans, and the innermost open span."""

    @contextlib.contextmanager
    def span(self, name: str, number: int | None = None) -> Iterator[None]:
        """Count the time in this context for `name`, except in inner spans. A name may be used again.

        `number` is for the trace.
        """
        assert name not in (WHOLE, REST, START), f"{name} is not a part of an iteration"
        assert threading.get_ident() == self._thread, f"the span {name} belongs to another thread"
        self._count()
        self._open.append(name)
        self._move()
        begin = self._since
        try:
            yield
        finally:
            self._count()
            self._open.pop()
            self._move()
            self._note(name, begin, self._since, number)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note a span in the trace alone; here its time counts for the span around it."""
        begin = self._clock()
        try:
            yield
        finally:
            self._note(name, begin, self._clock(), None)

    def read(self, name: str) -> float:
        """Return the seconds that spans of this name have taken since the last `take`."""
        self._count()
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call: "iteration", each span, and "other". An open span stays open.

        The first call after a restart also has "start".
        """
        self._count()
        taken = {WHOLE: self._since - self._begin, **self._seconds, REST: self._seconds.get(REST, 0.0)}
        if self._start is not None:
            taken[START] = self._start
        self._seconds, self._start = {}, None
        self._begin = self._since
        return taken

    def restart(self, start: float | None = None) -> None:
        """Forget the time until now; if `start` is given, the next `take` has it under "start"."""
        self.take()
        self._start = start

    def _note(self, name: str, begin: float, end: float, number: int | None) -> None:
        if self._recorder is not None:
            self._recorder.add(self._recorder.kind(MAIN, name), begin, end, number)

    def _innermost(self) -> str:
        return self._open[-1] if self._open else REST

    def _move(self) -> None:
        self.place = self.place[0] + 1, self._innermost()

    def _count(self) -> None:
        now = self._clock()
        name = self._innermost()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
