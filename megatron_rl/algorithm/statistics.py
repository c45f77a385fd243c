"""Sums and maxima over micro-batches, then over ranks; kept on the device until somebody reads them."""

import dataclasses
from collections.abc import Iterable, Mapping

import torch


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Scalars by name: those that add up, and those of which the largest counts."""

    sums: Mapping[str, torch.Tensor]
    maxima: Mapping[str, torch.Tensor]


def combined(many: Iterable[Statistics]) -> tuple[dict[str, float], dict[str, float]]:
    """The sums and the maxima of all, in float64, in the order in which they come."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for one in many:
        for name, value in one.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        for name, value in one.maxima.items():
            maxima[name] = _larger(maxima.get(name), float(value))
    return sums, maxima


def _larger(a: float | None, b: float) -> float:
    """NaN is the largest of all: Python's max would lose it."""
    if a is None or b != b:
        return b
    return a if a != a else max(a, b)
