"""The moment at which the sidecar names a fault of an engine."""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Iterator

NAMED_SECONDS = 20.0
"""Seconds within which faults must be named; also the deadline of the wait for it."""
_NAMES = ("its process", "its server", "got no answer", "was answered", "did not finish", "was not ready")
_WHOSE: contextvars.ContextVar[object] = contextvars.ContextVar("whose")


class Named(logging.Handler):
    """A recorder of the first message in which the sidecar names a fault of an engine."""

    def __init__(self, engine: str) -> None:
        super().__init__(logging.WARNING)
        self.engine = engine
        self.event = asyncio.Event()
        self.at = 0.0
        self.text = ""
        _WHOSE.set(self)

    def emit(self, record: logging.LogRecord) -> None:
        # A task has the context of the task that made it.
        if _WHOSE.get(None) is self:
            self.take(record.getMessage())

    def take(self, text: str) -> None:
        if not self.event.is_set() and self.engine in text and any(words in text for words in _NAMES):
            self.at, self.text = time.monotonic(), text
            self.event.set()


@contextlib.contextmanager
def naming(engine: str) -> Iterator[Named]:
    """Listen to the messages of the sidecar's tasks in this context; several contexts may be open at the same time."""
    named = Named(engine)
    logger = logging.getLogger("megatron_rl.sidecar")
    logger.addHandler(named)
    try:
        yield named
    finally:
        logger.removeHandler(named)
