"""A rank that fails ends all of them, with one reason: no rank is left waiting in a collective for one that is gone.

The first rank that fails writes its reason into the store that the ranks met in. A thread of every rank reads that
store, and ends its process when it finds one, whatever the rank is doing.
"""

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, NoReturn, Protocol

from megatron_rl.errors import ExitCode, MegatronRLError

_KEY = "megatron_rl/failure"
_POLL_SECONDS = 0.5
# The others' connections break when a rank goes: it stays until they have had time to read why.
_FAREWELL_SECONDS = 3 * _POLL_SECONDS
# Losing the store once may be the network; losing it this often in a row is losing the rank that keeps it.
_MOST_LOST = 5


class Store(Protocol):
    """What torch.distributed's stores offer."""

    def check(self, keys: list[str]) -> bool: ...

    def get(self, key: str) -> bytes: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Failure(NamedTuple):
    """Why the run ended, and where this happened first."""

    reason: str
    rank: int
    exit_code: int

    def __str__(self) -> str:
        return f"{self.reason} (rank {self.rank})"


class Watch:
    """A context around everything that ranks do together."""

    def __init__(self, store: Store, rank: int):
        self._store = store
        self._rank = rank
        self.tidy: Callable[[], None] = lambda: None
        """What is done last in a process that is ended; not more than a moment's work."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self._ended.set()
        self._thread.join()

    def fail(self, error: BaseException) -> NoReturn:
        """End this rank, and by that all: with the reason of the rank that failed first."""
        if isinstance(error, KeyboardInterrupt):
            text, code = "interrupted", ExitCode.INTERRUPTED
        elif isinstance(error, MegatronRLError):
            text, code = str(error), error.exit_code
        else:
            # A broken connection is what a rank sees of another's failure; the other's own reason is on its way.
            self._ended.wait(2 * _POLL_SECONDS)
            print(traceback.format_exc(), file=sys.stderr)
            text, code = f"{type(error).__name__}: {error}", ExitCode.CRASH
        own = Failure(text, self._rank, int(code))
        with contextlib.suppress(Exception):
            own = _decode(self._store.compare_set(_KEY, "", json.dumps(own)))
        if own.rank == self._rank:
            threading.Event().wait(_FAREWELL_SECONDS)
        self._end(own)

    def _poll(self) -> None:
        lost = 0
        while not self._ended.wait(_POLL_SECONDS):
            try:
                found = _decode(self._store.get(_KEY)) if self._store.check([_KEY]) else None
                lost = 0
            except Exception as error:
                found, lost = None, lost + 1
                if lost == _MOST_LOST:
                    self._end(Failure(f"the store of the ranks is gone: {error}", self._rank, int(ExitCode.RUN)))
            if found is not None and found.rank != self._rank:
                self._end(found)

    def _end(self, failure: Failure) -> NoReturn:
        """At once: what waits in a collective cannot be asked to leave it."""
        print(f"megatron_rl: the run ended: {failure}", file=sys.stderr)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            self.tidy()
        os._exit(failure.exit_code)


def _decode(data: bytes) -> Failure:
    return Failure(*json.loads(data))
