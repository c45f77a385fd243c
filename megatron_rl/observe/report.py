"""What is said when a run ends: what it came to, where its time went, and where everything lies."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from megatron_rl.observe.chart import Points, chart
from megatron_rl.observe.metrics import number_at, seconds_by_span


@dataclasses.dataclass(frozen=True, kw_only=True)
class Places:
    """Where the files of a run lie; None for what it does not write."""

    checkpoint: Path | None = None
    hf_weights: Path | None = None
    metrics: Path | None = None
    samples: Path | None = None
    audit_log: Path | None = None
    tensorboard: Path | None = None
    picture: Path | None = None


_TITLES = {
    "checkpoint": "checkpoint",
    "hf_weights": "Hugging Face weights",
    "metrics": "metrics",
    "samples": "samples",
    "audit_log": "audit log",
    "tensorboard": "TensorBoard",
    "picture": "picture",
}


def print_report(records: Sequence[Mapping[str, Any]], places: Places, stream: TextIO) -> None:
    """Print the report of a run whose metrics these are; headings are bold on a terminal."""
    console = Console(file=stream, highlight=False)
    for line in report_lines(records, places):
        is_heading = bool(line) and not line.startswith(" ")
        console.print(Text(line, style="bold" if is_heading else ""), soft_wrap=True)


def report_lines(records: Sequence[Mapping[str, Any]], places: Places) -> list[str]:
    """The report without styles: lines of a section are indented below its heading."""
    sections = {
        "what it came to": _results(records),
        "where the time went": _times(records),
        "where everything lies": _places(places),
    }
    lines: list[str] = []
    for heading, rows in sections.items():
        if rows:
            lines += ["", heading, *_table(rows)]
    return lines


def rewards_of(records: Iterable[Mapping[str, Any]]) -> Points:
    """The mean reward of each iteration."""
    return _points(records, ("reward", "mean"))


def evaluations_of(records: Iterable[Mapping[str, Any]]) -> Points:
    """The share of held-out prompts that passed, of the versions that were evaluated."""
    return _points(records, ("evaluation", "pass"))


def text_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The rewards of runs as a chart of text, and their evaluations as another."""
    charts = [chart("reward", {label: rewards_of(records) for label, records in runs.items()})]
    evaluations = {label: evaluations_of(records) for label, records in runs.items()}
    if any(evaluations.values()):
        charts.append(chart("evaluation", evaluations))
    return "\n\n".join(charts)


def time_by_span(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The seconds of all iterations by span, the longest first, and "other" last."""
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
    for title, points in (("reward", rewards_of(records)), ("evaluation", evaluations_of(records))):
        if points:
            (first, before), (last, after) = points[0], points[-1]
            rows.append((title, f"{before:.3f}", f"at version {first},", f"{after:.3f}", f"at version {last}"))
    return rows


def _times(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    totals = time_by_span(records)
    whole = sum(totals.values())
    if not whole:
        return []
    shares = {**totals, "all": whole}
    return [(name, f"{seconds:.1f} s", f"{100 * seconds / whole:.1f}%") for name, seconds in shares.items()]


def _places(places: Places) -> list[tuple[str, ...]]:
    found = {_TITLES[field.name]: getattr(places, field.name) for field in dataclasses.fields(places)}
    return [
        (title, str(path) if path.exists() else f"{path} (not there)")
        for title, path in found.items()
        if path is not None
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns below each other; figures to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if index and cell[:1].isdigit() else f"{cell:<{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines
