"""A trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

Every process of the run is a process of the trace, and every lane a thread. Groups overlap, so they are spread over
several threads. Counters show how many responses each engine had in flight, and how many groups waited for an engine.
"""

from collections.abc import Iterator
from typing import Any

from megatron_rl.analysis.report.traces import stack
from megatron_rl.observe.trace import COMPUTE, GROUPS, MAIN, SERVICE, Process, Span, Trace

Event = dict[str, Any]
_MICRO = 1e6
# The lanes of a process, in the order in which they are shown; engines and groups follow.
_ORDER = (MAIN, COMPUTE, SERVICE)


def convert(trace: Trace) -> dict[str, Any]:
    """Return the trace as an object for JSON; times begin with the trace."""
    begins = [window.begin for process in trace.processes for window in process.windows]
    start = min(begins, default=0.0)
    events: list[Event] = []
    for number, process in enumerate(trace.processes, start=1):
        events.append(_name("process_name", number, 0, process.name))
        events.append({**_name("process_sort_index", number, 0, ""), "args": {"sort_index": number}})
        events += _of_process(process, number, start)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start": start}}


def _of_process(process: Process, number: int, start: float) -> Iterator[Event]:
    lanes: dict[str, list[Span]] = {}
    for span in process.spans:
        # Groups have a lane for each engine and for each other step.
        is_group = span.lane == GROUPS
        lane = f"{GROUPS}: {span.details.get('engine', span.name)}" if is_group else span.lane
        lanes.setdefault(lane, []).append(span)
    known = [lane for lane in _ORDER if lane in lanes]
    threads = [*known, *sorted(lane for lane in lanes if lane not in known)]
    thread = 0
    for lane in threads:
        rows: dict[int, list[Span]] = {0: lanes[lane]}
        if lane.startswith(GROUPS):
            rows = {}
            for row, span in stack(lanes[lane]):
                rows.setdefault(row, []).append(span)
        for row, spans in rows.items():
            thread += 1
            yield _name("thread_name", number, thread, lane if len(rows) == 1 else f"{lane} {row + 1}")
            yield {**_name("thread_sort_index", number, thread, ""), "args": {"sort_index": thread}}
            for span in spans:
                yield _event(span, number, thread, start)
    yield from _counters(lanes, number, start)


def _event(span: Span, number: int, thread: int, start: float) -> Event:
    arguments = {**span.details, "number": span.number, "amount": span.amount}
    name = f"{span.name} {role}" if (role := span.details.get("role")) else span.name
    return {
        "ph": "X",
        "pid": number,
        "tid": thread,
        "name": name,
        "cat": span.lane,
        "ts": round((span.begin - start) * _MICRO, 3),
        "dur": round(span.seconds * _MICRO, 3),
        "args": {key: value for key, value in arguments.items() if value is not None},
    }


def _counters(lanes: dict[str, list[Span]], number: int, start: float) -> Iterator[Event]:
    for lane, spans in lanes.items():
        if not lane.startswith(GROUPS) or spans[0].name == "reward":
            continue
        sampled = f"responses in flight: {lane.removeprefix(f'{GROUPS}: ')}"
        name = {"queue": "groups that wait", "environment": "calls of environments"}.get(spans[0].name, sampled)
        changes = []
        for span in spans:
            size = span.details.get("size", 1)
            changes += [(span.begin, size), (span.end, -size)]
        count = 0
        for moment, change in sorted(changes):
            count += change
            ts = round((moment - start) * _MICRO, 3)
            yield {"ph": "C", "pid": number, "tid": 0, "name": name, "ts": ts, "args": {"count": count}}


def _name(kind: str, number: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": number, "tid": thread, "name": kind, "args": {"name": name}}
