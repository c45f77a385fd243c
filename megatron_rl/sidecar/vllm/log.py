"""Why a vLLM server ended, read from what it printed.

Several of its processes print a traceback when one fails. The API server's says to look above, the core's repeats what
a worker said, the worker's is the cause: the innermost process counts, and of its tracebacks the first, because the
other workers only lose a peer.
"""

import dataclasses
import datetime
import re
from collections.abc import Iterable, Sequence

# "(Worker_TP0 pid=77) ERROR 11-22 07:43:06 [multiproc_executor.py:1063] text", or without what logging adds.
_LINE = re.compile(
    r"(?P<process>\((?P<name>[^()]*?) ?pid=\d+[^()]*\)) ?"
    r"(?:(?P<level>[A-Z]+) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]*\] ?)?(?P<text>.*)"
)
_BEGIN = "Traceback (most recent call last)"
# The processes of a server from the outermost to the innermost, as the beginnings of their names.
_KINDS = (("", "server"), ("EngineCore", "core"), ("Worker", "worker"), ("VllmWorker", "worker"))
# An error that the server outlived is not why it ended: those who fail together say so within this time.
_TOGETHER = datetime.timedelta(seconds=60)
_NUM_FRAMES = 2
# Of a message that goes on, indented, after its first line.
_MOST_MESSAGE_LINES = 8
_NUM_LAST_LINES = 10


@dataclasses.dataclass
class _Report:
    """A traceback, or a line that was logged as an error."""

    depth: int
    time: datetime.datetime
    lines: list[str]
    is_traceback: bool


def cause(log: Sequence[str]) -> str:
    """The process that failed first with the end of its traceback; the last lines where there is none."""
    reports, latest = _reports(log)
    recent = [report for report in reports if latest - report.time <= _TOGETHER]
    if not recent:
        return "\n".join([line for line in log if line.strip()][-_NUM_LAST_LINES:])
    deepest = max(report.depth for report in recent)
    of_deepest = [report for report in recent if report.depth == deepest]
    first = next((report for report in of_deepest if report.is_traceback), of_deepest[0])
    # That a process is gone is said by another one, in a line.
    deaths = [line for report in recent for line in report.lines if "died unexpectedly" in line][:1]
    lines = _end(first.lines) if first.is_traceback else first.lines
    return "\n".join([f"in its {_KINDS[first.depth][1]}:", *deaths, *(line for line in lines if line not in deaths)])


def _reports(log: Iterable[str]) -> tuple[list[_Report], datetime.datetime]:
    """What went wrong, and the time of the last line that has one."""
    reports: list[_Report] = []
    # The tracebacks that are being read: lines of several processes come mixed.
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
            if not _goes_on(open_ones[process].lines, text):
                del open_ones[process]
            else:
                open_ones[process].lines.append(text)
        elif match and match["level"] and text:
            reports.append(_Report(_depth(match), time, [text], is_traceback=False))
    return reports, time


def _goes_on(lines: Sequence[str], text: str) -> bool:
    """Whether a line belongs to the traceback that ended with these lines so far."""
    said = next((index for index, line in enumerate(lines[1:], 1) if not line.startswith(" ")), None)
    if said is None:
        return True
    return text.startswith(" ") and bool(text.strip()) and len(lines) - said < _MOST_MESSAGE_LINES


def _end(lines: Sequence[str]) -> list[str]:
    """The last frames, and what was raised."""
    kept = [line for line in lines[1:] if set(line.strip()) - set("^~")]
    frames = [index for index, line in enumerate(kept) if line.startswith("  File ")]
    return kept[frames[-_NUM_FRAMES] :] if len(frames) >= _NUM_FRAMES else kept


def _depth(match: re.Match[str] | None) -> int:
    name = match["name"] if match else ""
    return max(depth for depth, (begin, _) in enumerate(_KINDS) if name.startswith(begin))
