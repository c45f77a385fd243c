"""Writes down what a process did and when: a line of spans an iteration, in RUN/trace/PROCESS.jsonl.

docs/metrics.md has the format, `observe/trace.py` reads it. Invariants:

- a span costs one call and no more than a list of numbers; what it is called is said once a line;
- lines follow each other without a gap, from the recorder's start to its last line;
- a file stays below its bound: older iterations are dropped, so that the files of all processes have some in common.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.records.append_file import LineFile

FOLDER = "trace"
FORMAT = 1
# Of one iteration; more are counted, and not written.
MOST_SPANS = 200_000
MOST_BYTES = 64 << 20
# So many of the newest iterations are kept whatever is dropped.
_NUM_NEWEST = 8
_MICRO = 1e6

Kind = int
"""What a span is: its lane, its name and its details, told to the recorder once."""


class Recorder:
    """The spans of a process since its last line. One thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MOST_SPANS) -> None:
        self.now = clock
        self._most = most
        self._kinds: dict[tuple[str, str, tuple[tuple[str, Any], ...]], Kind] = {}
        self._spans: list[tuple[Kind, float, float, int | None, int | None]] = []
        self._num_dropped = 0
        self._begin = clock()

    def kind(self, lane: str, name: str, **details: str | int | bool) -> Kind:
        """Return the kind of span; spans of one lane do not overlap unless one is within the other."""
        return self._kinds.setdefault((lane, name, tuple(details.items())), len(self._kinds))

    def add(self, kind: Kind, begin: float, end: float, number: int | None = None, amount: int | None = None) -> None:
        """Note a span by this process's clock; `number` says which, `amount` how much: tokens, or bytes."""
        if len(self._spans) < self._most:
            self._spans.append((kind, begin, end, number, amount))
        else:
            self._num_dropped += 1

    @property
    def has_spans(self) -> bool:
        """Whether there are any since the last line."""
        return bool(self._spans)

    def restart(self) -> None:
        """Forget the time until now."""
        self.take()

    def take(self) -> dict[str, Any]:
        """Return what the next line says of the time since the last one, and begin anew."""
        end = self.now()
        begin, self._begin = self._begin, end
        spans, self._spans = self._spans, []
        num_dropped, self._num_dropped = self._num_dropped, 0
        return {
            "begin": begin,
            "end": end,
            "dropped": num_dropped,
            "kinds": [{"lane": lane, "name": name, **dict(details)} for lane, name, details in self._kinds],
            # Written out, since the sidecar's event loop waits for this.
            "spans": [
                [kind, round((first - begin) * _MICRO), round((last - first) * _MICRO), number, amount]
                if amount is not None
                else [kind, round((first - begin) * _MICRO), round((last - first) * _MICRO), number]
                if number is not None
                else [kind, round((first - begin) * _MICRO), round((last - first) * _MICRO)]
                for kind, first, last, number, amount in spans
            ],
        }


class TraceFile(LineFile):
    """The trace of one process; see `LineFile` for what a kill leaves and what a resumed run does."""

    def __init__(self, run: Path, process: str, facts: Mapping[str, Any] | None = None, most: int = MOST_BYTES) -> None:
        """`facts` are what every line says beside its spans."""
        super().__init__(find_path(run, process))
        self._facts = {"format": FORMAT, "process": process, "host": socket.gethostname(), "pid": os.getpid()}
        self._facts |= facts or {}
        self._most = most

    def write(self, version: int, taken: Mapping[str, Any], **facts: Any) -> None:
        """Append an iteration's line. If the file gets too long, drop iterations: see `thin`."""
        self.append_encoded(version, msgspec.json.encode({"version": version, **self._facts, **facts, **taken}))
        if self.size > self._most:
            self.thin(self._most // 2)

    def thin(self, size: int) -> None:
        """Keep the iterations whose numbers are multiples of 2, or of 4, 8, ... until what is left fits the size.

        So files that are thinned at other times, and more often, have the multiples of the largest interval in common.
        """
        sizes = self.sizes()
        newest = {version for version, _ in sizes[-_NUM_NEWEST:]}
        interval = 2
        while interval <= sizes[-1][0] and sum(length for version, length in sizes if version % interval == 0) > size:
            interval *= 2
        self.keep(lambda version: version % interval == 0 or version in newest)


def find_path(run: Path, process: str) -> Path:
    """Where a process of a run writes its trace."""
    return run / FOLDER / f"{process}.jsonl"


def find_own_offset() -> float:
    """Return what this process adds to its clock for seconds since the epoch, as its host tells them now."""
    return time.time() - time.monotonic()
