"""Distributions of the lengths of prompts and responses, in tokens, with their tails."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_rl.errors import UsageError

_FORMS = "fixed:TOKENS, uniform:LEAST:MOST or lognormal:MEAN:SIGMA[:MOST]"


class Lengths(Protocol):
    """A distribution of lengths."""

    @property
    def mean(self) -> float: ...

    @property
    def most(self) -> float:
        """Return the upper bound of a length; infinity if it has none."""
        ...

    def draw(self, generator: np.random.Generator, num_groups: int, group_size: int) -> list[list[int]]:
        """Draw a length for each response of each group; each is at least 1."""
        ...


@dataclasses.dataclass(frozen=True)
class Uniform:
    """All whole numbers from `least` to `most`, equally likely."""

    least: int
    most: int

    @property
    def mean(self) -> float:
        return (self.least + self.most) / 2

    def draw(self, generator: np.random.Generator, num_groups: int, group_size: int) -> list[list[int]]:
        drawn: list[list[int]] = generator.integers(self.least, self.most + 1, (num_groups, group_size)).tolist()
        return drawn


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """A distribution with a long tail: the logarithm is normal with deviation `sigma`, and `most` cuts the lengths."""

    uncut_mean: float
    sigma: float
    most: float = math.inf
    of_group: float = 0.0
    """The share of the logarithm's variance that the responses of a group have in common."""

    @property
    def mean(self) -> float:
        """Return the mean of the lengths after the cut."""
        if math.isinf(self.most) or not self.sigma:
            return min(self.uncut_mean, self.most)
        middle = math.log(self.uncut_mean) - self.sigma**2 / 2
        edge = (math.log(self.most) - middle) / self.sigma
        return self.uncut_mean * _normal(edge - self.sigma) + self.most * (1 - _normal(edge))

    def draw(self, generator: np.random.Generator, num_groups: int, group_size: int) -> list[list[int]]:
        common = generator.standard_normal((num_groups, 1)) * math.sqrt(self.of_group)
        own = generator.standard_normal((num_groups, group_size)) * math.sqrt(1 - self.of_group)
        lengths = np.exp(math.log(self.uncut_mean) - self.sigma**2 / 2 + self.sigma * (common + own))
        drawn: list[list[int]] = np.clip(np.rint(lengths), 1, self.most).astype(np.int64).tolist()
        return drawn


@dataclasses.dataclass(frozen=True)
class Empirical:
    """The lengths of a run's responses. Whole groups are drawn, so that the likeness of their responses is kept."""

    groups: Sequence[Sequence[int]]

    @property
    def mean(self) -> float:
        return sum(map(sum, self.groups)) / sum(map(len, self.groups))

    @property
    def most(self) -> float:
        return max(map(max, self.groups))

    def draw(self, generator: np.random.Generator, num_groups: int, group_size: int) -> list[list[int]]:
        chosen = [self.groups[index] for index in generator.integers(0, len(self.groups), num_groups)]
        # A group of the wanted size is taken whole, each response once.
        return [
            list(group) if len(group) == group_size else [int(one) for one in generator.choice(group, group_size)]
            for group in chosen
        ]


def parse_lengths(text: str, flag: str) -> Lengths:
    """Parse the words of a distribution on a command line."""
    name, *parts = text.split(":")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if not values or not all(math.isfinite(value) for value in values):
        raise UsageError(f"{flag} {text} must be {_FORMS}, in numbers: write one of them")
    if name == "fixed" and len(values) == 1 and values[0] >= 1:
        return Uniform(int(values[0]), int(values[0]))
    if name == "uniform" and len(values) == 2 and 1 <= values[0] <= values[1]:
        return Uniform(int(values[0]), int(values[1]))
    if name == "lognormal" and len(values) in (2, 3) and values[0] >= 1 and values[1] >= 0:
        most = values[2] if len(values) == 3 else math.inf
        if most >= 1:
            return Lognormal(values[0], values[1], most)
    raise UsageError(
        f"{flag} {text} must be {_FORMS}, with at least 1 token, MOST not below LEAST and SIGMA at least 0: write one"
    )


def _normal(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2
