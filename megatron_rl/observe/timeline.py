"""Where the time of an iteration goes."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

WHOLE = "iteration"
REST = "other"


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

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """The time in here is that of `name`, save what an inner span takes. A name may come again."""
        assert name not in (WHOLE, REST), f"{name} is not a part of an iteration"
        assert threading.get_ident() == self._thread, f"the span {name} is of another thread"
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds since the last call: "iteration", each span, and "other". A span that is open goes on."""
        self._count()
        taken = {WHOLE: self._since - self._begin, **self._seconds, REST: self._seconds.get(REST, 0.0)}
        self._seconds = {}
        self._begin = self._since
        return taken

    def restart(self) -> None:
        """Forget the time until now, as that of starting up."""
        self.take()

    def _count(self) -> None:
        now = self._clock()
        name = self._open[-1] if self._open else REST
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
