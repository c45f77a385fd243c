"""Writes and reads the trace of a run: the spans of all of its processes, on one clock; docs/metrics.md has the format.

Each process writes a line of spans an iteration, in RUN/trace/PROCESS.jsonl. Invariants of writing:

- a span costs one call and at most a list of numbers; its name is written once a line;
- lines follow each other without a gap, from the recorder's start to its last line;
- a file stays below its bound: older iterations are dropped, so that the files of all processes have some in common.

What is read is on rank 0's clock. It advances with the steady clock of rank 0's host, and tells seconds since the epoch
as that host told them when rank 0 started.
"""

import dataclasses
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.errors import InputError, check_writer
from megatron_rl.shared.records.append_file import LineFile, read_lines

FOLDER = "trace"
FORMAT = 1
# The bound of spans of one iteration; further ones are counted, and not written.
MOST_SPANS = 200_000
MOST_BYTES = 64 << 20
# The number of newest iterations that are kept in any case.
_NUM_NEWEST = 8
_MICROSECOND = 1e-6
_MICROSECONDS = 1e6
# Lanes of a rank.
MAIN = "main"
COMPUTE = "compute"
POLICY = "policy"
"""The role of the model that is trained, in the details of a pass."""
# Lanes of the sidecar; each engine has one more, named after it.
SERVICE = "service"
GROUPS = "groups"
SIDECAR = "sidecar"

Kind = int
"""The number of a kind of span, whose lane, name and details are told to the recorder once."""


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
        """Note a span by this process's clock; `number` identifies it, `amount` counts its tokens or bytes."""
        if len(self._spans) < self._most:
            self._spans.append((kind, begin, end, number, amount))
        else:
            self._num_dropped += 1

    @property
    def has_spans(self) -> bool:
        """Return True if a span was added since the last line."""
        return bool(self._spans)

    def restart(self) -> None:
        """Forget the time until now."""
        self.take()

    def take(self) -> dict[str, Any]:
        """Return the content of the next line, for the time since the last one, and start the next."""
        end = self.now()
        begin, self._begin = self._begin, end
        spans, self._spans = self._spans, []
        num_dropped, self._num_dropped = self._num_dropped, 0
        return {
            "begin": begin,
            "end": end,
            "dropped": num_dropped,
            "kinds": [{"lane": lane, "name": name, **dict(details)} for lane, name, details in self._kinds],
            # Written out for speed, since the sidecar's event loop waits for this.
            "spans": [
                [kind, round((first - begin) * _MICROSECONDS), round((last - first) * _MICROSECONDS), number, amount]
                if amount is not None
                else [kind, round((first - begin) * _MICROSECONDS), round((last - first) * _MICROSECONDS), number]
                if number is not None
                else [kind, round((first - begin) * _MICROSECONDS), round((last - first) * _MICROSECONDS)]
                for kind, first, last, number, amount in spans
            ],
        }


class TraceFile(LineFile):
    """The trace file of one process; `LineFile` describes its behaviour after a kill and a resume."""

    def __init__(self, run: Path, process: str, facts: Mapping[str, Any] | None = None, most: int = MOST_BYTES) -> None:
        """Open the file; `facts` are written in every line next to its spans."""
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
        """Keep the iterations whose numbers are multiples of 2, or of 4, 8, ... until the rest fits the size.

        So files that are thinned at different times, or more often, have the multiples of the largest interval in
        common.
        """
        sizes = self.sizes()
        newest = {version for version, _ in sizes[-_NUM_NEWEST:]}
        interval = 2
        while interval <= sizes[-1][0] and sum(length for version, length in sizes if version % interval == 0) > size:
            interval *= 2
        self.keep(lambda version: version % interval == 0 or version in newest)


def find_path(run: Path, process: str) -> Path:
    return run / FOLDER / f"{process}.jsonl"


def find_own_offset() -> float:
    """Return the difference between this host's seconds since the epoch and this process's clock."""
    return time.time() - time.monotonic()


# Reading.


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A step of a process, from `begin` to `end` in seconds."""

    lane: str
    name: str
    begin: float
    end: float
    number: int | None = None
    """The slot of a micro-batch, the prompt of a group, or the version of a publish."""
    amount: int | None = None
    """Tokens of a micro-batch or of a group's responses."""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Window:
    """A line of a process's file: an iteration of this process. A window begins where the last one ended."""

    version: int
    begin: float
    end: float
    spans: tuple[Span, ...]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The line's other values: `host`, `pid`, `replica`, `stage`, `engines`, ..."""
    num_dropped: int = 0
    """Spans beyond the bound, which were not written."""
    error: float | None = None
    """The most seconds by which these times may differ from rank 0's clock; None if that was not measured."""


@dataclasses.dataclass(frozen=True)
class Process:
    """The trace of one process: a trainer rank, or the sidecar."""

    name: str
    windows: tuple[Window, ...]

    @property
    def is_rank(self) -> bool:
        return self.name.startswith("rank-")

    @property
    def spans(self) -> Iterator[Span]:
        return itertools.chain.from_iterable(window.spans for window in self.windows)


@dataclasses.dataclass(frozen=True)
class Trace:
    """The traces of a run's processes, ranks first."""

    processes: tuple[Process, ...]

    @property
    def ranks(self) -> tuple[Process, ...]:
        return tuple(process for process in self.processes if process.is_rank)

    @property
    def sidecar(self) -> Process | None:
        return next((process for process in self.processes if process.name == SIDECAR), None)

    @property
    def versions(self) -> list[int]:
        """Return the iterations that every process has."""
        sets = [{window.version for window in process.windows} for process in self.processes]
        return sorted(set.intersection(*sets)) if sets else []

    def select(self, versions: Iterable[int]) -> "Trace":
        """Return the same trace with these iterations alone."""
        kept = set(versions)
        return Trace(
            tuple(
                Process(process.name, tuple(window for window in process.windows if window.version in kept))
                for process in self.processes
            )
        )


def read_trace(run: Path) -> Trace:
    """Read the trace of a run's folder; it may grow meanwhile."""
    paths = sorted((run / FOLDER).glob("*.jsonl"), key=_order)
    lines = {path.stem: read_lines(path) for path in paths}
    if not any(lines.values()):
        raise InputError(
            f"{run / FOLDER} has no trace: wait for the end of the first iteration, or start the run with --trace on"
        )
    for name, records in lines.items():
        for record in records:
            path = run / FOLDER / f"{name}.jsonl"
            check_writer(path, record.get("format"), FORMAT, "read it with that version")
    clocks = _read_clocks(lines.get("rank-0", []))
    return Trace(
        tuple(
            Process(name, tuple(_window(record, clocks.get(name, {})) for record in records))
            for name, records in lines.items()
            if records
        )
    )


_Offset = tuple[float, float | None]


def _read_clocks(of_rank_0: list[dict[str, Any]]) -> dict[str, dict[int, _Offset]]:
    """Return the offsets and errors of other processes' clocks that rank 0 measured, by process and version."""
    found: dict[str, dict[int, _Offset]] = {}
    for record in of_rank_0:
        for process, (offset, error) in record.get("clocks", {}).items():
            found.setdefault(process, {})[record["version"]] = (offset, error)
    return found


_OWN = {"version", "begin", "end", "dropped", "kinds", "spans", "format", "process", "offset", "error", "clocks"}


def _window(record: Mapping[str, Any], measured: Mapping[int, _Offset]) -> Window:
    version = record["version"]
    offset, error = record["offset"], record.get("error")
    if measured:
        nearest = min(measured, key=lambda other: abs(other - version))
        offset, error = measured[nearest]
    begin, kinds = record["begin"] + offset, record["kinds"]
    return Window(
        version=version,
        begin=begin,
        end=record["end"] + offset,
        spans=tuple(_span(begin, kinds, row) for row in record["spans"]),
        facts={name: value for name, value in record.items() if name not in _OWN},
        num_dropped=record["dropped"],
        error=error,
    )


def _span(start: float, kinds: list[dict[str, Any]], row: list[Any]) -> Span:
    kind, begin, length, number, amount, *_ = *row, None, None
    details = dict(kinds[kind])
    lane, name = details.pop("lane"), details.pop("name")
    first = start + begin * _MICROSECOND
    return Span(lane, name, first, first + length * _MICROSECOND, number, amount, details)


def _order(path: Path) -> tuple[bool, int, str]:
    """Return a key that sorts ranks by number, then the sidecar."""
    kind, _, number = path.stem.partition("-")
    is_rank = kind == "rank" and number.isdecimal()
    return not is_rank, int(number) if is_rank else 0, path.stem


# Clocks of other processes.


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A question and its answer: this process's clock at both, and the other clock in between."""

    asked: float
    told: float
    answered: float


@dataclasses.dataclass(frozen=True)
class Offset:
    """The seconds to add to this process's clock to get the other one, at most `error` seconds wrong."""

    seconds: float
    error: float


def estimate_offset(exchanges: Iterable[Exchange]) -> Offset:
    """Estimate the offset by the fastest answer: the other clock was read between question and answer."""
    best = min(exchanges, key=lambda exchange: exchange.answered - exchange.asked)
    middle = (best.asked + best.answered) / 2
    return Offset(best.told - middle, (best.answered - best.asked) / 2)


def ask_clock(clock: Callable[[], float], other: Callable[[], float], count: int) -> list[Exchange]:
    """Ask for the other clock `count` times."""
    return [Exchange(clock(), other(), clock()) for _ in range(count)]
