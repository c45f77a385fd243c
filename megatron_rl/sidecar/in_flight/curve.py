"""The time of an engine's decode step over the number of responses that it samples, learned from groups.

A step gives every running response one token. So a group takes as many steps as its longest response has tokens, and
its duration over that number is the time of a step, at the mean number of responses that ran meanwhile.

Invariants:

- a step with more responses takes at least as long as one with fewer;
- between two known numbers of responses, the time of a step lies on the straight line between theirs;
- below the least and above the largest known number, it lies on the line that fits all known numbers best;
- if one number is known, that line goes through the origin. So fewer responses are taken to give as many tokens a
  second, until an iteration shows it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

# The numbers of responses in two bins differ by this factor at least.
_FACTOR = 2**0.5
_NUM_PASSES = 2


@dataclasses.dataclass(frozen=True)
class GroupLife:
    """A group that an engine has sampled."""

    engine: str
    begun: float
    """Seconds, on any clock."""
    ended: float
    lengths: tuple[int, ...]
    """The tokens of each response."""
    num_before: int = 0
    """Responses in flight on the engine when the group began, without its own."""
    is_evaluation: bool = False


@dataclasses.dataclass(frozen=True)
class Point:
    """The time of a step, as one group shows it."""

    num_running: float
    seconds: float
    num_steps: int
    """Steps that the group took, its weight."""


@dataclasses.dataclass(frozen=True)
class StepCurve:
    """Seconds of a decode step by the number of running responses."""

    nums: tuple[float, ...]
    """Known numbers of running responses, ascending."""
    seconds: tuple[float, ...]
    line: tuple[float, float]
    """Seconds of a step, and of each response in it, on the line that fits all known numbers best."""

    @property
    def least_known(self) -> float:
        return self.nums[0]

    def step_seconds(self, num_running: np.ndarray) -> np.ndarray:
        """Return the seconds of a step with each of these numbers of running responses."""
        numbers = np.asarray(num_running, dtype=np.float64)
        found = np.interp(numbers, self.nums, self.seconds)
        fixed, of_response = self.line
        fitted = fixed + of_response * numbers
        found = np.where(numbers < self.nums[0], np.minimum(fitted, self.seconds[0]), found)
        return np.where(numbers > self.nums[-1], np.maximum(fitted, self.seconds[-1]), found)


def fit_curve(points: Sequence[Point]) -> StepCurve:
    ordered = sorted(points, key=lambda point: point.num_running)
    bins: list[list[Point]] = []
    for point in ordered:
        if not bins or point.num_running > _FACTOR * bins[-1][0].num_running:
            bins.append([])
        bins[-1].append(point)
    weights = [float(sum(point.num_steps for point in one)) for one in bins]
    nums = [_mean([point.num_running for point in one], one) for one in bins]
    seconds = _sort_upwards([_mean([point.seconds for point in one], one) for one in bins], weights)
    return StepCurve(tuple(nums), tuple(seconds), _fit_line(nums, seconds, weights))


def _mean(values: Sequence[float], points: Sequence[Point]) -> float:
    return float(np.average(values, weights=[point.num_steps for point in points]))


def _sort_upwards(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the ascending values nearest to these: neighbours that descend get their common mean."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            before = blocks.pop()
            whole = before[1] + block[1]
            block = ((before[0] * before[1] + block[0] * block[1]) / whole, whole, before[2] + block[2])
        blocks.append(block)
    return [value for value, _, count in blocks for _ in range(count)]


def _fit_line(nums: Sequence[float], seconds: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return the line of no negative part that fits best, by the relative error; through the origin for one number."""
    if len(nums) == 1:
        return 0.0, seconds[0] / nums[0]
    x, y, w = (np.asarray(values) for values in (nums, seconds, weights))
    w = w / y**2
    center, height = np.average(x, weights=w), np.average(y, weights=w)
    slope = float(np.average((x - center) * (y - height), weights=w) / np.average((x - center) ** 2, weights=w))
    fixed = float(height - slope * center)
    if fixed < 0:
        return 0.0, float(np.average(x * y, weights=w) / np.average(x * x, weights=w))
    return fixed, slope


def read_points(lives: Sequence[GroupLife], max_running: int, known: StepCurve | None = None) -> list[Point]:
    """Read what the groups of an iteration show.

    A group that may have waited in its engine, since more than `max_running` responses were in flight, shows nothing.
    `known` is what is known about the curve: steps are shorter while fewer responses run. If it has one number or none,
    a group's steps count as equally long.
    """
    points = []
    for engine in dict.fromkeys(life.engine for life in lives):
        points += _read_engine([life for life in lives if life.engine == engine], max_running, known)
    return points


def _read_engine(lives: Sequence[GroupLife], max_running: int, known: StepCurve | None) -> list[Point]:
    shown = [
        index for index, life in enumerate(lives)
        if life.num_before + len(life.lengths) <= max_running and max(life.lengths) > 0 and life.ended > life.begun
    ]  # fmt: skip
    if not shown:
        return []
    begun, ended = (np.array([getattr(life, name) for life in lives]) for name in ("begun", "ended"))
    owner = np.repeat(np.arange(len(lives)), [len(life.lengths) for life in lives])
    share = np.concatenate([np.array(life.lengths) / max(1, *life.lengths) for life in lives])
    ends = begun[owner] + share * (ended - begun)[owner]
    steps = np.array([max(life.lengths) for life in lives])
    points: list[Point] = []
    for _ in range(_NUM_PASSES):
        times, running = _count_running(begun[owner], ends, max_running)
        if known is not None and len(known.nums) > 1:
            # Nothing passes while nothing runs, whatever the line says of a step without responses.
            rate = np.where(running > 0, 1 / known.step_seconds(np.maximum(running, 1)), 0.0)
        else:
            rate = _mean_rates(times, begun, ended, steps)
        passed = np.concatenate([[0.0], np.cumsum(rate * np.diff(times))])
        loaded = np.concatenate([[0.0], np.cumsum(running * rate * np.diff(times))])
        first, last = (np.interp(moments, times, passed) for moments in (begun, ended))
        load = np.interp(ended, times, loaded) - np.interp(begun, times, loaded)
        points = [
            Point(float(load[i] / (last[i] - first[i])), float((ended[i] - begun[i]) / steps[i]), int(steps[i]))
            for i in shown
        ]
        # Within a group's life, a response ends after its share of the steps.
        ends = np.interp(first[owner] + share * (last - first)[owner], passed, times)
    return points


def _count_running(begun: np.ndarray, ends: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the times at which the number of running responses changes, and the number after each but the last."""
    times, places = np.unique(np.concatenate([begun, ends]), return_inverse=True)
    changes = np.bincount(places[: len(begun)], minlength=len(times)) - np.bincount(
        places[len(begun) :], minlength=len(times)
    )
    return times, np.minimum(np.cumsum(changes)[:-1], most).astype(np.float64)


def _mean_rates(times: np.ndarray, begun: np.ndarray, ended: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the steps a second between these times: the mean over the groups that live then, of their whole lives."""
    speeds = np.zeros(len(times))
    living = np.zeros(len(times))
    for first, last, speed in zip(
        np.searchsorted(times, begun), np.searchsorted(times, ended), steps / (ended - begun), strict=True
    ):
        speeds[first] += speed
        speeds[last] -= speed
        living[first] += 1
        living[last] -= 1
    return (np.cumsum(speeds) / np.maximum(np.cumsum(living), 1))[:-1]
