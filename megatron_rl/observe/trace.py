"""Reads the trace of a run: the spans of all of its processes, on one clock; docs/metrics.md has the format.

The clock is rank 0's: it goes as the steady clock of rank 0's host goes, and says seconds since the epoch as that host
told them when rank 0 started.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.observe.recorder import FOLDER, FORMAT
from megatron_rl.records.append_file import read_lines

# Lanes of a rank.
MAIN = "main"
COMPUTE = "compute"
# Lanes of the sidecar; each engine has one more, named after it.
SERVICE = "service"
GROUPS = "groups"
SIDECAR = "sidecar"

_MICRO = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """What a process did from `begin` to `end`."""

    lane: str
    name: str
    begin: float
    end: float
    number: int | None = None
    """Which one: the slot of a micro-batch, the prompt of a group, the version of a publish."""
    amount: int | None = None
    """How much: tokens of a micro-batch or of a group's responses."""
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclasses.dataclass(frozen=True)
class Window:
    """A line of a process's file: an iteration, as this process saw it. A window begins where the one before ended."""

    version: int
    begin: float
    end: float
    spans: tuple[Span, ...]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else the line says: `host`, `pid`, `replica`, `stage`, `engines`, ..."""
    num_dropped: int = 0
    """Spans that were too many to write."""
    error: float | None = None
    """How far this window's times may be from rank 0's clock, in seconds; None if that was not measured."""


@dataclasses.dataclass(frozen=True)
class Process:
    """The trace of one process: a trainer rank, or the sidecar."""

    name: str
    windows: tuple[Window, ...]

    @property
    def is_rank(self) -> bool:
        return self.name.startswith("rank-")


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
        """The iterations that every process has."""
        sets = [{window.version for window in process.windows} for process in self.processes]
        return sorted(set.intersection(*sets)) if sets else []

    def of(self, versions: Iterable[int]) -> "Trace":
        """Return the same trace with these iterations alone."""
        kept = set(versions)
        return Trace(
            tuple(
                Process(process.name, tuple(window for window in process.windows if window.version in kept))
                for process in self.processes
            )
        )


def read(run: Path) -> Trace:
    """Read the trace of a run's folder; it may grow meanwhile."""
    paths = sorted((run / FOLDER).glob("*.jsonl"), key=_order)
    lines = {path.stem: read_lines(path) for path in paths}
    if not any(lines.values()):
        raise InputError(
            f"{run / FOLDER} has no trace: wait for the end of the first iteration, or start the run with --trace on"
        )
    for name, records in lines.items():
        for record in records:
            if record.get("format") != FORMAT:
                raise InputError(
                    f"{run / FOLDER / name}.jsonl has the format {record.get('format')}, and this version reads "
                    f"{FORMAT}: read it with the megatron_rl that wrote it"
                )
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
    """Return what rank 0 measured of other processes' clocks, by process and version."""
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
        spans=tuple(_span(begin, kinds, *row) for row in record["spans"]),
        facts={name: value for name, value in record.items() if name not in _OWN},
        num_dropped=record["dropped"],
        error=error,
    )


def _span(
    start: float,
    kinds: list[dict[str, Any]],
    kind: int,
    begin: int,
    length: int,
    number: int | None = None,
    amount: int | None = None,
) -> Span:
    details = dict(kinds[kind])
    lane, name = details.pop("lane"), details.pop("name")
    first = start + begin * _MICRO
    return Span(lane, name, first, first + length * _MICRO, number, amount, details)


def _order(path: Path) -> tuple[bool, int, str]:
    """Ranks by number, then the sidecar."""
    kind, _, number = path.stem.partition("-")
    is_rank = kind == "rank" and number.isdecimal()
    return not is_rank, int(number) if is_rank else 0, path.stem
