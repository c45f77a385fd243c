"""Where the time of an iteration goes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

WHOLE = "iteration"
REST = "other"
# Not of an iteration: what the run did before its first one.
START = "start"


class Timeline:
    """Seconds by the name of a span, each moment counted once.

    Invariants: a moment belongs to the innermost span that is open, or to "other"; so the parts of an iteration add up
    to the whole. One thread has it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._begin = self._since = clock()
        self._start: float | None = None

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The time in here is that of `name`, save what an inner span takes. A name may come again."""
        assert name not in (WHOLE, REST, START), f"{name} is not a part of an iteration"
        assert threading.get_ident() == self._thread, f"the span {name} is of another thread"
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds since the last call: "iteration", each span, and "other". A span that is open goes on.

        The first call after a restart has "start" beside them.
        """
        self._count()
        taken = {WHOLE: self._since - self._begin, **self._seconds, REST: self._seconds.get(REST, 0.0)}
        if self._start is not None:
            taken[START] = self._start
        self._seconds, self._start = {}, None
        self._begin = self._since
        return taken

    def restart(self, start: float | None = None) -> None:
        """Forget the time until now; the next `take` has these seconds under "start", where they are given."""
        self.take()
        self._start = start

    def _count(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open else REST
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
