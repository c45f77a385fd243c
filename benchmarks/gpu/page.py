"""The page and the picture of `make gpu-bench`."""

import dataclasses
import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.__main__ import describe_machine, find_commit
from benchmarks.gpu.tables import TABLES, Row, Table

PAGE, PICTURE = "RESULTS-GPU.md", "results-gpu.svg"
# The columns of publish's table that are its parts.
PUBLISH_PARTS = ("announce", "pause", "load", "commit", "probe", "open", "other")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a part."""

    name: str
    state: Literal["complete", "cut short", "failed", "left out"]
    reason: str
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        return self.state == "failed"


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """The place of a measurement."""

    device: str
    packages: str
    place: str
    """Host, commit and day."""


def describe_place() -> str:
    """Describe host, commit and day."""
    return f"{describe_machine()}; commit {find_commit()}, {datetime.date.today():%d %B %Y}"


def write(folder: Path, circumstances: Circumstances, outcomes: Sequence[Outcome], rows: Sequence[Row]) -> Path:
    """Write the page, with the picture if matplotlib is installed, and return the page's path."""
    try:
        draw(rows, folder / PICTURE)
        picture = f"![Ratios, and seconds of a publish and of a start by their parts]({PICTURE})"
    except ImportError:
        picture = "It has no picture: matplotlib is missing."
    (folder / PAGE).write_text(describe(circumstances, outcomes, rows, picture))
    return folder / PAGE


def describe(circumstances: Circumstances, outcomes: Sequence[Outcome], rows: Sequence[Row], picture: str) -> str:
    """Return the text of the page."""
    seconds = sum(outcome.seconds for outcome in outcomes)
    lines = [
        "# What one GPU measured",
        "",
        f"Written by `make gpu-bench` in {seconds / 60:.1f} minutes on {circumstances.device}. Weights are random. "
        "Figures are medians, and rivals take turns.",
        "",
        f"{circumstances.packages}; {circumstances.place}.",
        "",
        picture,
    ]
    for name, table in TABLES.items():
        if of_table := [row for row in rows if row.table == name]:
            lines += ["", f"## {table.title}", "", f"Rows: {table.names}.", "", *_tabulate(table, of_table)]
    lines += ["", "## Parts", "", "| part | outcome | seconds | |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.name} | {one.state} | {one.seconds:.0f} | {_escape(one.reason)} |" for one in outcomes]
    return "\n".join(lines) + "\n"


def say(row: Row) -> str:
    """Return the row as a line for people."""
    shown = ", ".join(f"{key} {_format(figure)}" for key, figure in row.figures.items())
    return f"{row.table}: {row.name}: {shown or 'left out'}{f' ({row.note})' if row.note else ''}"


def _tabulate(table: Table, rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table and of its legend; columns without a figure are left out."""
    keys = [key for key in table.figures if any(key in row.figures for row in rows)]
    has_notes = any(row.note for row in rows)
    header = ["", *(f"`{key}`" for key in keys), *([""] if has_notes else [])]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for row in rows:
        cells = [_format(row.figures[key]) if key in row.figures else "" for key in keys]
        note = [_escape(row.note)] if has_notes else []
        lines.append(f"| {' | '.join([_escape(row.name), *cells, *note])} |")
    return [*lines, "", *(f"- `{key}`: {table.figures[key]}" for key in keys)]


def _format(figure: float) -> str:
    """Return the figure without an exponent if it is large."""
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"


def _escape(text: str) -> str:
    """Return the text as a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw every ratio as a bar on one logarithmic axis, and below it a publish and a start by their parts."""
    from matplotlib.figure import Figure

    ratios = [
        (f"{row.table} {row.name}: {meaning}", row.figures[key])
        for row in rows
        for key, meaning in TABLES[row.table].ratios.items()
        if row.figures.get(key, 0) > 0
    ]
    stacks = divide_seconds(rows)
    figure = Figure(figsize=(12, 2 + 0.3 * (len(ratios) + 1) + 0.6 * (len(stacks) + 1)), layout="constrained")
    of_ratios, of_seconds = figure.subplots(2, 1, height_ratios=[len(ratios) + 1, 2 * len(stacks) + 1])
    bars = of_ratios.barh([name for name, _ in ratios], [math.log2(value) for _, value in ratios])
    of_ratios.bar_label(bars, [f"{value:.2f}" for _, value in ratios], padding=3)
    of_ratios.axvline(0, color="black", linewidth=0.8)
    of_ratios.invert_yaxis()
    of_ratios.margins(x=0.12)
    of_ratios.xaxis.set_major_formatter(lambda value, _: f"{2**value:.3g}")
    for name, parts in stacks:
        left = 0.0
        for part, share in parts:
            of_seconds.barh([name], [share], left=left, edgecolor="white")
            if share > 0.06:
                of_seconds.text(left + share / 2, name, part, ha="center", va="center", fontsize=7, color="white")
            left += share
    of_seconds.invert_yaxis()
    of_seconds.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.savefig(out)


def divide_seconds(rows: Sequence[Row]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Return each publish and the start, with the names of their parts and the shares of them."""
    stacks = []
    for row in rows:
        if row.table == "publish" and row.figures:
            parts = [(key, max(0.0, row.figures[key])) for key in PUBLISH_PARTS]
            stacks.append((f"publish, {row.name}: {row.figures['seconds']:.2f} s", parts))
    moments = sorted(
        ((row.figures["at"], row.name) for row in rows if row.table == "start" and row.figures), key=lambda one: one[0]
    )
    if moments:
        before = [0.0, *(at for at, _ in moments)]
        parts = [(name.split(":")[0], at - last) for (at, name), last in zip(moments, before, strict=False)]
        stacks.append((f"start: {moments[-1][0]:.1f} s", parts))
    return [(name, [(part, seconds / sum(s for _, s in parts)) for part, seconds in parts]) for name, parts in stacks]
