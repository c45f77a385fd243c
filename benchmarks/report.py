"""Print what every benchmark prints: a table for people, and one JSON object as the very last line."""

import json
import statistics
from collections.abc import Mapping, Sequence


def table(title: str, rows: Mapping[str, Sequence[float]], unit: str) -> None:
    """Print median, least and greatest of each row's figures."""
    print(f"\n{title}")
    print(f"{'':<34}{'median':>10}{'min':>10}{'max':>10}   {unit}")
    for name, figures in rows.items():
        print(f"{name:<34}{statistics.median(figures):>10.3f}{min(figures):>10.3f}{max(figures):>10.3f}")


def finish(figures: Mapping[str, float]) -> None:
    """Print the last line."""
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}), flush=True)
