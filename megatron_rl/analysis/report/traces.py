"""A run's trace in the report: the ledger of the whole trace, and the spans of some iterations.

Of the iterations that the trace still has, the first, the slowest and the newest ones are shown. An iteration with too
many spans keeps the longest, and says how many were left out.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.analysis.ledger import ENGINE_CAUSES, RANK_CAUSES, compute_ledger
from megatron_rl.errors import InputError
from megatron_rl.observe import trace as trace_file
from megatron_rl.observe.trace import GROUPS, Process, Span, Trace

_NUM_NEWEST, _NUM_SLOWEST = 6, 3
MOST_SPANS = 4000
"""The bound of spans of an iteration."""
_MICRO = 1e6


def summarize_trace(folder: Path) -> dict[str, Any] | None:
    """Read the ledger and some iterations; return None if the run has no trace."""
    if not any((folder / trace_file.FOLDER).glob("*.jsonl")):
        return None
    try:
        trace = trace_file.read_trace(folder)
    except InputError as error:
        return {"problem": str(error)}
    accounts = compute_ledger(trace)
    return {
        "causes": {"rank": RANK_CAUSES, "engine": ENGINE_CAUSES},
        "accounts": [
            [account.name, "rank" if account.is_rank else "engine", account.wall, account.seconds]
            for account in accounts
        ],
        "num_iterations": len(trace.versions),
        "iterations": [describe_iteration(trace, version) for version in _choose(trace)],
    }


def describe_iteration(trace: Trace, version: int, most: int = MOST_SPANS) -> dict[str, Any]:
    """Describe the spans of all processes in an iteration, by lane, in microseconds since its begin."""
    windows = [
        (process, window) for process in trace.processes for window in process.windows if window.version == version
    ]
    begin = min(window.begin for _, window in windows)
    spans = [(_name_lane(process, span), span) for process, window in windows for span in window.spans]
    longest = sorted(range(len(spans)), key=lambda place: -spans[place][1].seconds)[:most]
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    for lane, span in (spans[place] for place in sorted(longest)):
        lanes[lane].append(span)
    errors = [window.error for _, window in windows if window.error is not None]
    return {
        "version": version,
        "seconds": max(window.end for _, window in windows) - begin,
        "error": max(errors, default=None),
        "num_left_out": sum(window.num_dropped for _, window in windows) + len(spans) - len(longest),
        "lanes": [
            [lane, [_describe_span(row, span, begin) for row, span in stack(of_lane)]]
            for lane, of_lane in lanes.items()
        ],
    }


def stack(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the first row that is free when it begins; spans within another lie below it."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        row = next((row for row, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[row : row + 1] = [span.end]
        yield row, span


def _describe_span(row: int, span: Span, begin: float) -> list[Any]:
    details = {name: value for name, value in span.details.items() if value not in (None, False)}
    first = round((span.begin - begin) * _MICRO)
    return [row, span.name, first, round(span.seconds * _MICRO), span.number, span.amount, details]


def _name_lane(process: Process, span: Span) -> str:
    """Name the lane of a span; groups share the lane of the engine that samples them."""
    if process.is_rank:
        return f"{process.name} {span.lane}"
    if span.lane != GROUPS:
        return span.lane
    return f"{span.details['engine']} groups" if "engine" in span.details else f"groups: {span.name}"


def _choose(trace: Trace) -> list[int]:
    versions = trace.versions
    if not versions:
        return []
    seconds = {window.version: window.end - window.begin for window in trace.processes[0].windows}
    slowest = sorted(versions, key=lambda version: -seconds.get(version, 0.0))[:_NUM_SLOWEST]
    return sorted({versions[0], *slowest, *versions[-_NUM_NEWEST:]})
