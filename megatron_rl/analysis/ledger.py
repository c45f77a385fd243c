"""Accounts for the time of every process: each moment of a rank and of an engine has one cause.

Pure: from the spans of a trace to seconds. docs/metrics.md defines the causes. Invariants:

- the causes of a process add up to its wall time, exactly: it is counted in whole nanoseconds;
- wall time is the time of a process's windows, so the time between two starts of a run counts for no process;
- a rank that computes counts as computing, whatever its host waits for meanwhile.
"""

import bisect
import dataclasses
import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from megatron_rl.observe.trace import COMPUTE, GROUPS, MAIN, SERVICE, Process, Span, Trace

RANK_CAUSES = (
    "busy", "first", "starved", "environment", "tail", "publish", "bubble", "optimizer", "checkpoint", "evaluation",
    "report", "other",
)  # fmt: skip
ENGINE_CAUSES = ("busy", "environment", "tail", "idle", "publish", "evaluation", "other")

# The cause of each innermost span of a rank's loop. Within a schedule, the spans have the names of Megatron's timers.
_OF_LOOP = {
    "publish": "publish",
    "reference": "publish",
    "teacher": "publish",
    "evaluate": "evaluation",
    "optimizer": "optimizer",
    "update": "optimizer",
    "save": "checkpoint",
    "complete": "report",
    "report": "report",
    "trace": "report",
    "pack": "report",
    "train": "other",
}
_NANO = 1e9


@dataclasses.dataclass(frozen=True)
class Account:
    """The time of one trainer rank or engine, in seconds."""

    name: str
    is_rank: bool
    wall: float
    seconds: dict[str, float]
    """Seconds by cause."""
    details: dict[str, float]
    """Seconds by the parts of a cause: "busy: forward policy", "bubble: forward-recv"."""

    def share(self, cause: str) -> float:
        """Return the cause's share of the wall time."""
        return self.seconds[cause] / self.wall if self.wall else 0.0


def compute_ledger(trace: Trace) -> list[Account]:
    """Account for the time of every rank, and then of every engine."""
    engines = _Engines(trace.sidecar)
    evaluating = _find_evaluations(trace)
    return [*(_of_rank(rank, engines.droughts, evaluating) for rank in trace.ranks), *engines.accounts()]


def divide_rank(trace: Trace, rank: Process) -> Iterator[tuple[float, float, str]]:
    """Yield every piece of a rank's time in order: its begin and end by the common clock, and its cause."""
    for begin, end, cause, _ in _divide_rank(rank, _Engines(trace.sidecar).droughts, _find_evaluations(trace)):
        yield begin / _NANO, end / _NANO, cause


def divide_engine(trace: Trace, name: str) -> Iterator[tuple[float, float, str]]:
    """Yield the same for an engine."""
    for begin, end, state in _sweep(trace.sidecar):
        if state.is_recorded:
            yield begin / _NANO, end / _NANO, state.cause(name)


class Pieces:
    """A value at each moment, None outside of all pieces; pieces do not overlap, and their ends are in nanoseconds."""

    def __init__(self, pieces: Iterable[tuple[int, int, object]]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece[:2])
        self._begins = [begin for begin, _, _ in self._pieces]

    def over(self, begin: int, end: int) -> Iterator[tuple[int, int, object]]:
        """Divide the time from `begin` to `end` by value."""
        index = max(0, bisect.bisect_right(self._begins, begin) - 1)
        while begin < end:
            first, last, value = self._pieces[index] if index < len(self._pieces) else (end, end, None)
            if last <= begin and index < len(self._pieces):
                index += 1
                continue
            if first > begin:
                first = min(first, end)
                yield begin, first, None
                begin = first
                continue
            yield begin, min(last, end), value
            begin, index = min(last, end), index + 1


def find_innermost(spans: Iterable[Span]) -> Iterator[tuple[int, int, Span]]:
    """Divide the time of nested spans: each moment belongs to the one that began last."""
    opened: list[tuple[int, Span]] = []
    now = 0
    for span in sorted(spans, key=lambda span: (_ticks(span.begin), -_ticks(span.end))):
        begin, end = _ticks(span.begin), _ticks(span.end)
        while opened and opened[-1][0] <= begin:
            last, outer = opened.pop()
            if last > now:
                yield now, last, outer
                now = last
        if opened:
            # Rounding may put an end after that of the span around it.
            end = min(end, opened[-1][0])
            if begin > now:
                yield now, begin, opened[-1][1]
        now = max(now, begin)
        opened.append((end, span))
    while opened:
        last, outer = opened.pop()
        if last > now:
            yield now, last, outer
            now = last


def _find_evaluations(trace: Trace) -> Pieces:
    """Return the times at which rank 0 evaluated."""
    return Pieces(
        (_ticks(span.begin), _ticks(span.end), True)
        for process in trace.ranks[:1]
        for span in process.spans
        if (span.lane, span.name) == (MAIN, "evaluate")
    )


def _of_rank(rank: Process, droughts: Pieces, evaluating: Pieces) -> Account:
    ticks: Counter[str] = Counter()
    details: Counter[str] = Counter()
    for begin, end, cause, detail in _divide_rank(rank, droughts, evaluating):
        ticks[cause] += end - begin
        details[f"{cause}: {detail}"] += end - begin
    return _account(rank.name, True, RANK_CAUSES, ticks, details)


def _divide_rank(rank: Process, droughts: Pieces, evaluating: Pieces) -> Iterator[tuple[int, int, str, str]]:
    """Yield the begin, the end, the cause and the name of each piece of a rank's time."""
    by_lane: defaultdict[str, list[Span]] = defaultdict(list)
    for span in rank.spans:
        by_lane[span.lane].append(span)
    computing = Pieces(_without_overlaps(by_lane[COMPUTE]))
    loop = Pieces(find_innermost(by_lane[MAIN]))
    for window in rank.windows:
        for begin, end, passed in computing.over(_ticks(window.begin), _ticks(window.end)):
            if isinstance(passed, Span):
                yield begin, end, "busy", f"{passed.name} {passed.details['role']}"
                continue
            for first, last, part in loop.over(begin, end):
                yield from _causes(part, first, last, droughts, evaluating)


def _causes(
    part: object, begin: int, end: int, droughts: Pieces, evaluating: Pieces
) -> Iterator[tuple[int, int, str, str]]:
    """Divide a time within one part of a rank's loop in which the rank does not compute."""
    if not isinstance(part, Span):
        yield begin, end, "other", "outside of all spans"
    elif part.name == "submit":
        # The other ranks wait here for rank 0, which evaluates first.
        for first, last, is_evaluating in evaluating.over(begin, end):
            yield first, last, "evaluation" if is_evaluating else "first", part.name
    elif part.name == "wait" and part.number == 0:
        yield begin, end, "first", part.name
    elif part.name == "wait":
        for first, last, why in droughts.over(begin, end):
            yield first, last, str(why or "starved"), part.name
    else:
        yield begin, end, _OF_LOOP.get(part.name, "bubble"), part.name


def _without_overlaps(spans: Iterable[Span]) -> Iterator[tuple[int, int, Span]]:
    """Yield passes, which follow each other in the device's queue, without the overlaps of rounding."""
    now = 0
    for span in sorted(spans, key=lambda span: span.begin):
        begin, end = max(now, _ticks(span.begin)), _ticks(span.end)
        if end > begin:
            yield begin, end, span
            now = end


class _Engines:
    """The engines of a sidecar over time."""

    def __init__(self, sidecar: Process | None) -> None:
        self._ticks: defaultdict[str, Counter[str]] = defaultdict(Counter)
        droughts: list[tuple[int, int, object]] = []
        for begin, end, state in _sweep(sidecar):
            if state.is_recorded:
                for name in state.capacities:
                    self._ticks[name][state.cause(name)] += end - begin
            if state.are_dry():
                why = "environment" if state.waits_for_environments() else "tail"
                if droughts and droughts[-1][1:] == (begin, why):
                    droughts[-1] = (droughts[-1][0], end, why)
                else:
                    droughts.append((begin, end, why))
        self.droughts = Pieces(droughts)
        """The causes of times at which no group waits for an engine while one of them could sample more."""

    def accounts(self) -> list[Account]:
        return [_account(name, False, ENGINE_CAUSES, self._ticks[name], Counter()) for name in sorted(self._ticks)]


def _sweep(sidecar: Process | None) -> Iterator[tuple[int, int, "_SidecarState"]]:
    """Yield the begin and the end of each time without a change of the sidecar, and the state within it."""
    if sidecar is None:
        return
    state = _SidecarState({})
    for window in sidecar.windows:
        state.capacities |= window.facts.get("engines", {})
    changes = list(_changes(sidecar))
    heapq.heapify(changes)
    now = 0
    while changes:
        moment, number, key, engine = heapq.heappop(changes)
        if moment > now:
            yield now, moment, state
            now = moment
        state.counts[key, engine] += number


class _SidecarState:
    """The counts of groups, responses, publishes and evaluations at a moment, by engine."""

    def __init__(self, capacities: dict[str, int]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.capacities = capacities

    @property
    def is_recorded(self) -> bool:
        return bool(self.counts["window", ""])

    def cause(self, engine: str) -> str:
        """Return the cause of an engine's time in this state."""
        counts = self.counts
        if counts["down", engine]:
            return "other"
        if counts["publish", ""]:
            return "publish"
        if counts["groups", engine]:
            if counts["queue", ""] or self._is_full(engine):
                return "busy"
            return "environment" if self.waits_for_environments() else "tail"
        if counts["evaluated groups", engine]:
            return "evaluation"
        if counts["queue", ""]:
            return "idle"
        if self.waits_for_environments():
            return "environment"
        if any(counts["groups", other] for other in self.capacities):
            return "tail"
        return "evaluation" if counts["evaluation", ""] else "idle"

    def are_dry(self) -> bool:
        if self.counts["queue", ""]:
            return False
        up = [name for name in self.capacities if not self.counts["down", name]]
        return not all(self._is_full(name) for name in up)

    def waits_for_environments(self) -> bool:
        """Return True if more conversations are with their environments than with engines."""
        return self.counts["environment", ""] > sum(self.counts["groups", name] for name in self.capacities)

    def _is_full(self, engine: str) -> bool:
        """Return True if the engine has no room to sample another group at once."""
        num_groups = self.counts["groups", engine] + self.counts["evaluated groups", engine]
        if not num_groups:
            return False
        in_flight = self.counts["responses", engine]
        return in_flight + in_flight / num_groups > self.capacities[engine]


_Change = tuple[int, int, str, str]


def _changes(sidecar: Process) -> Iterator[_Change]:
    """Yield the changes of counts: the time, the number to add, the key and the engine."""
    for window in sidecar.windows:
        yield from _around(window.begin, window.end, "window")
        for span in window.spans:
            if (span.lane == SERVICE and span.name in ("publish", "evaluation")) or (
                span.lane == GROUPS and span.name in ("queue", "environment") and not span.details.get("evaluation")
            ):
                yield from _around(span.begin, span.end, span.name)
            elif span.lane == GROUPS and span.name == "generate":
                engine, size = span.details["engine"], span.details["size"]
                key = "evaluated groups" if span.details.get("evaluation") else "groups"
                yield from _around(span.begin, span.end, key, engine)
                yield from _around(span.begin, span.end, "responses", engine, size)
            elif span.name == "down":
                yield from _around(span.begin, span.end, "down", span.lane)


def _around(begin: float, end: float, key: str, engine: str = "", number: int = 1) -> Iterator[_Change]:
    yield _ticks(begin), number, key, engine
    yield max(_ticks(begin), _ticks(end)), -number, key, engine


def _account(name: str, is_rank: bool, causes: Sequence[str], ticks: Counter[str], details: Counter[str]) -> Account:
    return Account(
        name=name,
        is_rank=is_rank,
        wall=sum(ticks.values()) / _NANO,
        seconds={cause: ticks[cause] / _NANO for cause in causes},
        details={detail: length / _NANO for detail, length in sorted(details.items())},
    )


def _ticks(seconds: float) -> int:
    return round(seconds * _NANO)
