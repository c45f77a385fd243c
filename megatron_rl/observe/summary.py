"""The summary that is printed when a run ends: its results, its time by part, and the paths of its files."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from megatron_rl.observe.metrics import ACCEPTED_LENGTH, TIME, number_at, pass_name, seconds_by_span, start_seconds
from megatron_rl.observe.timeline import START

# A point of a curve: the iteration and its value.
Points = Sequence[tuple[float, float]]
Places = Mapping[str, Path | None]
"""The paths of a run's files by their titles; None for a file that the run does not write."""

_MARKS = "*o+x#"
_SEVERAL = "="


def chart(title: str, curves: Mapping[str, Points], width: int = 60, height: int = 12) -> str:
    """Draw the curves in one grid of `width` columns and `height` rows, with labelled axes and a mark for each curve.

    A column shows the mean of its points; without points, it is interpolated from its neighbours.
    """
    shown = {label: sorted(points) for label, points in curves.items() if points}
    if not shown:
        return f"{title}: nothing yet"
    first, last = _range(x for points in shown.values() for x, _ in points)
    columns = {label: _columns(points, first, last, width) for label, points in shown.items()}
    bottom, top = _range(y for values in columns.values() for y in values if y is not None)
    # One row is enough for a single value.
    height = height if top > bottom else 1
    rows = [[" "] * width for _ in range(height)]
    for mark, values in zip(_MARKS * len(columns), columns.values(), strict=False):
        for column, value in enumerate(values):
            if value is not None:
                row = rows[_row(value, bottom, top, height)]
                row[column] = mark if row[column] == " " else _SEVERAL
    labelled = (0, height // 2, height - 1) if height > 1 else ()
    labels = {row: f"{top - (top - bottom) * row / (height - 1):.3g}" for row in labelled} or {0: f"{top:.3g}"}
    margin = max(map(len, labels.values()))
    legend = [f"{mark} {label}" for mark, label in zip(_MARKS * len(shown), shown, strict=False)]
    lines = [title] if len(shown) == 1 else ["   ".join((title, *legend, f"{_SEVERAL} several"))]
    lines += [f"{labels.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(rows)]
    lines.append(f"{'':>{margin}} +{'-' * width}")
    left, right = f"{first:g}", f"{last:g}" if last > first else ""
    lines.append(f"{'':>{margin}}  {left}{'iteration':^{width - len(left) - len(right)}}{right}".rstrip())
    return "\n".join(lines)


def _columns(points: Points, first: float, last: float, width: int) -> list[float | None]:
    """Compute the value of each column; None before the first point and after the last."""
    bins: dict[int, list[float]] = {}
    for x, y in points:
        bins.setdefault(round((x - first) / (last - first) * (width - 1)) if last > first else 0, []).append(y)
    known = sorted((column, sum(values) / len(values)) for column, values in bins.items())
    columns: list[float | None] = [None] * width
    for (left, from_value), (right, to_value) in itertools.pairwise(known):
        for column in range(left, right):
            columns[column] = from_value + (to_value - from_value) * (column - left) / (right - left)
    columns[known[-1][0]] = known[-1][1]
    return columns


def _row(value: float, bottom: float, top: float, height: int) -> int:
    return height - 1 if top == bottom else int((top - value) / (top - bottom) * (height - 1) + 0.5)


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


def print_summary(
    records: Sequence[Mapping[str, Any]], places: Places, stream: TextIO, notes: Sequence[str] = ()
) -> None:
    """Print the summary of the run with these metrics; headings are bold on a terminal."""
    console = Console(file=stream, highlight=False)
    for line in summary_lines(records, places, notes):
        is_heading = bool(line) and not line.startswith(" ")
        console.print(Text(line, style="bold" if is_heading else ""), soft_wrap=True)


def summary_lines(records: Sequence[Mapping[str, Any]], places: Places, notes: Sequence[str] = ()) -> list[str]:
    """Return the lines of the summary without styles; those of a section are indented below its heading."""
    sections: dict[str, Sequence[tuple[str, ...]]] = {
        "results": _results(records),
        "time by part": _times(records),
        "files": _list_files(places),
        "notes": [(note,) for note in notes],
    }
    lines: list[str] = []
    for heading, rows in sections.items():
        if rows:
            lines += ["", heading, *_table(rows)]
    return lines


def rewards_of(records: Iterable[Mapping[str, Any]]) -> Points:
    return _points(records, ("reward", "mean"))


def evaluations_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return, by name, the evaluated versions' share of held-out prompts that passed, and their mean reward.

    With one response a prompt and rewards of 0 and 1 the two are equal, and only one curve is returned.
    """
    name, passed = pass_name(records), _points(records, ("evaluation", "pass"))
    means = _points(records, ("evaluation", "mean"))
    if passed and passed == means:
        return {f"mean reward ({name})": means}
    found = {name: passed, "mean reward": means}
    return {name: points for name, points in found.items() if points}


def results_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """Return the results of iterations by name: the mean reward, or the losses if the run has no rewards."""
    rewards = rewards_of(records)
    losses = {"loss": _points(records, ("loss",)), "held-out loss": _points(records, ("evaluation", "loss"))}
    found = {"reward": rewards} if rewards else losses
    return {name: points for name, points in found.items() if points}


def text_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Draw a text chart of the runs' rewards or losses, and one of each number of their evaluations."""
    results = {label: results_of(records) for label, records in runs.items()}
    names = dict.fromkeys(name for curves in results.values() for name in curves) or {"reward": None}
    charts = [chart(name, {label: curves.get(name, ()) for label, curves in results.items()}) for name in names]
    evaluations = {label: evaluations_of(records) for label, records in runs.items()}
    for name in dict.fromkeys(name for curves in evaluations.values() for name in curves):
        of_runs = {label: curves[name] for label, curves in evaluations.items() if name in curves}
        charts.append(chart(f"evaluation, {name}", of_runs))
    return "\n\n".join(charts)


def time_by_span(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Sum the seconds of all iterations by span, the longest first, and "other" last."""
    totals: dict[str, float] = {}
    for record in records:
        for name, seconds in seconds_by_span(record).items():
            totals[name] = totals.get(name, 0.0) + seconds
    return dict(sorted(totals.items(), key=lambda item: (item[0] == "other", -item[1])))


def _points(records: Iterable[Mapping[str, Any]], names: Sequence[str]) -> Points:
    found = ((record["version"], number_at(record, *names)) for record in records)
    return [(version, value) for version, value in found if value is not None]


def _results(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    curves = results_of(records)
    curves |= {f"evaluation, {name}": points for name, points in evaluations_of(records).items()}
    failed = _points(records, ("responses", "failed"))
    curves["failed responses"] = failed if any(share for _, share in failed) else []
    curves["drafts, accepted length"] = _points(records, (TIME, ACCEPTED_LENGTH))
    for title, points in curves.items():
        if points:
            (first, before), (last, after) = points[0], points[-1]
            rows.append((title, f"{before:.3f}", f"at version {first},", f"{after:.3f}", f"at version {last}"))
    return rows


def _times(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    start = start_seconds(records)
    totals = {START: start, **time_by_span(records)} if start else time_by_span(records)
    whole = sum(totals.values())
    if not whole:
        return []
    shares = {**totals, "all": whole}
    return [(name, f"{seconds:.1f} s", f"{100 * seconds / whole:.1f}%") for name, seconds in shares.items()]


def _list_files(places: Places) -> list[tuple[str, ...]]:
    return [
        (title, str(path) if path.exists() else f"{path} (missing)")
        for title, path in places.items()
        if path is not None
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align the columns, figures to the right and words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if index and cell[:1].isdigit() else f"{cell:<{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines
