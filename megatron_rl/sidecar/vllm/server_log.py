"""The log of a vLLM server: why the server ended, and how long the parts of its start took.

When one process fails, several print a traceback. The API server's says to look above, the core's repeats a worker's
error, and the worker's has the cause. So the first traceback of the innermost process counts: the other workers only
lose a peer.

The seconds of a start come from the kernel's account of processes too. They are for people only: a phrase that another
vLLM words differently is left out, and nothing depends on it.
"""

import dataclasses
import datetime
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_rl.sidecar.processes import read_process

SERVER = "imports of the server"
CORE = "imports of the core"
MODEL = "model"
COMPILATION = "compilation"
GRAPHS = "graphs"
WARM_UP = "memory and warm-up"
TRIAL = "trial of an update"

_PHRASES = {
    MODEL: re.compile(r"Model loading took .* and ([\d.]+) seconds"),
    COMPILATION: re.compile(r"torch\.compile took ([\d.]+) s in total"),
    GRAPHS: re.compile(r"Graph capturing finished in ([\d.]+) secs"),
    # This one holds the two above.
    WARM_UP: re.compile(r"init engine \(.*\) took ([\d.]+) s"),
}


def measure_server(worker: int) -> float:
    """Return the seconds between the starts of a server and of its core; `worker` is a process of the core, or it.

    An engine's processes are a session, which the server leads. Return 0 if one of them has ended.
    """
    try:
        leader = os.getsid(worker)
    except ProcessLookupError:
        return 0.0
    core = found = read_process(worker)
    while found is not None and found.parent != leader and found.parent > 1:
        core = found = read_process(found.parent)
    server = read_process(leader)
    if core is None or server is None:
        return 0.0
    return (core.started - server.started) / os.sysconf("SC_CLK_TCK")


def describe_start(until_answer: float, server: float, trial: float, log: Sequence[str]) -> Mapping[str, float]:
    """Divide the seconds until a server answers into parts, which follow one another; `trial` came after them."""
    found = {
        part: max(float(match[1]) for match in matches)
        for part, phrase in _PHRASES.items()
        if (matches := [match for line in log if (match := phrase.search(line))])
    }
    if WARM_UP in found:
        found[WARM_UP] = max(0.0, found[WARM_UP] - found.get(COMPILATION, 0.0) - found.get(GRAPHS, 0.0))
    core = until_answer - server - sum(found.values())
    return {SERVER: server, CORE: max(0.0, core), **found, TRIAL: trial}


# "(Worker_TP0 pid=77) ERROR 11-22 07:43:06 [multiproc_executor.py:1063] text", or without the fields of logging.
_LINE = re.compile(
    r"(?P<process>\((?P<name>[^()]*?) ?pid=\d+[^()]*\)) ?"
    r"(?:(?P<level>[A-Z]+) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] ?)?(?P<text>.*)"
)
_BEGIN = "Traceback (most recent call last)"
# The prefixes of the names of a server's processes, from the outermost to the innermost.
_KINDS = (("", "server"), ("EngineCore", "core"), ("Worker", "worker"), ("VllmWorker", "worker"))
# Only errors from the server's last minute may be the cause of its end: it survived the earlier ones.
_TOGETHER = datetime.timedelta(seconds=60)
_NUM_FRAMES = 2
# The most lines to keep of an error message that continues, indented, after its first line.
_MOST_MESSAGE_LINES = 8
_NUM_LAST_LINES = 10


@dataclasses.dataclass
class _Report:
    """A traceback, or a line that was logged as an error."""

    depth: int
    time: datetime.datetime
    lines: list[str]
    is_traceback: bool


def find_cause(log: Sequence[str]) -> str:
    """Name the process that failed first, with the end of its traceback; return the last lines if there is none."""
    reports, latest = _reports(log)
    recent = [report for report in reports if latest - report.time <= _TOGETHER]
    if not recent:
        return "\n".join([line for line in log if line.strip()][-_NUM_LAST_LINES:])
    deepest = max(report.depth for report in recent)
    of_deepest = [report for report in recent if report.depth == deepest]
    first = next((report for report in of_deepest if report.is_traceback), of_deepest[0])
    # Another process reports the death of a process, in a single line.
    deaths = [line for report in recent for line in report.lines if "died unexpectedly" in line][:1]
    lines = _end(first.lines) if first.is_traceback else first.lines
    return "\n".join([f"in its {_KINDS[first.depth][1]}:", *deaths, *(line for line in lines if line not in deaths)])


def _reports(log: Iterable[str]) -> tuple[list[_Report], datetime.datetime]:
    """Collect tracebacks and errors; return them with the time of the last line that has a time."""
    reports: list[_Report] = []
    # The incomplete tracebacks, by process: lines of several processes are interleaved.
    open_ones: dict[str, _Report] = {}
    time = datetime.datetime.min
    for line in log:
        match = _LINE.match(line)
        process, text = (match["process"], match["text"]) if match else ("", line)
        if match and match["time"]:
            # Logs do not name the year; a leap year has every day.
            time = datetime.datetime.strptime(f"2000-{match['time']}", "%Y-%m-%d %H:%M:%S")
        if match and match["level"] not in (None, "ERROR", "CRITICAL"):
            open_ones.pop(process, None)
        elif text.startswith(_BEGIN):
            open_ones[process] = _Report(_depth(match), time, [text], is_traceback=True)
            reports.append(open_ones[process])
        elif process in open_ones:
            if not _continues(open_ones[process].lines, text):
                del open_ones[process]
            else:
                open_ones[process].lines.append(text)
        elif match and match["level"] and text:
            reports.append(_Report(_depth(match), time, [text], is_traceback=False))
    return reports, time


def _continues(lines: Sequence[str], text: str) -> bool:
    """Check whether the next line of a process still belongs to the traceback that has these lines so far."""
    said = next((index for index, line in enumerate(lines[1:], 1) if not line.startswith(" ")), None)
    if said is None:
        return True
    return text.startswith(" ") and bool(text.strip()) and len(lines) - said < _MOST_MESSAGE_LINES


def _end(lines: Sequence[str]) -> list[str]:
    """Return the last frames of a traceback, and the error that was raised."""
    kept = [line for line in lines[1:] if set(line.strip()) - set("^~")]
    frames = [index for index, line in enumerate(kept) if line.startswith("  File ")]
    return kept[frames[-_NUM_FRAMES] :] if len(frames) >= _NUM_FRAMES else kept


def _depth(match: re.Match[str] | None) -> int:
    name = match["name"] if match else ""
    return max(depth for depth, (begin, _) in enumerate(_KINDS) if name.startswith(begin))
