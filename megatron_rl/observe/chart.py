"""A curve as text, for terminals."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

# A point of a curve: the iteration and its value.
Points = Sequence[tuple[float, float]]
_MARKS = "*o+x#"
_SEVERAL = "="


def chart(title: str, curves: Mapping[str, Points], width: int = 60, height: int = 12) -> str:
    """The curves in one grid of `width` columns and `height` rows, with labels on its axes and a mark for each curve.

    A column shows the mean of the points that fall into it, or lies on the line between its neighbours.
    """
    shown = {label: sorted(points) for label, points in curves.items() if points}
    if not shown:
        return f"{title}: nothing yet"
    first, last = _range(x for points in shown.values() for x, _ in points)
    columns = {label: _columns(points, first, last, width) for label, points in shown.items()}
    bottom, top = _range(y for values in columns.values() for y in values if y is not None)
    rows = [[" "] * width for _ in range(height)]
    for mark, values in zip(_MARKS * len(columns), columns.values(), strict=False):
        for column, value in enumerate(values):
            if value is not None:
                row = rows[_row(value, bottom, top, height)]
                row[column] = mark if row[column] == " " else _SEVERAL
    # A flat curve lies on the lowest row; the others have no value of their own.
    at_row = {row: top - (top - bottom) * row / (height - 1) for row in (0, height // 2, height - 1)}
    labels = {row: f"{value:.3g}" for row, value in at_row.items() if top > bottom or row == height - 1}
    margin = max(map(len, labels.values()))
    lines = [title] if len(shown) == 1 else ["   ".join((title, *_legend(shown)))]
    lines += [f"{labels.get(row, ''):>{margin}} |{''.join(cells).rstrip()}" for row, cells in enumerate(rows)]
    lines.append(f"{'':>{margin}} +{'-' * width}")
    left, right = f"{first:g}", f"{last:g}" if last > first else ""
    lines.append(f"{'':>{margin}}  {left}{'iteration':^{width - len(left) - len(right)}}{right}".rstrip())
    return "\n".join(lines)


def _columns(points: Points, first: float, last: float, width: int) -> list[float | None]:
    """The value of each column; None before the first point and behind the last."""
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


def _legend(curves: Mapping[str, Points]) -> list[str]:
    marks = zip(_MARKS * len(curves), curves, strict=False)
    return [*(f"{mark} {label}" for mark, label in marks), f"{_SEVERAL} several"]


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)
