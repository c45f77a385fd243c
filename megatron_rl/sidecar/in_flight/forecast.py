"""The predicted course of an iteration, and the number of responses in flight with which training ends first.

Every running response gets a token in every step. So the order of events is computed in steps, with no time in it, and
one sum over steps turns it into seconds. Invariants of a forecast:

- groups begin in order; each begins once its delay has passed and the responses in flight leave room for it;
- of the responses in flight at most `max_running` run, those that began first;
- a group is finished with its longest response;
- the trainer takes `groups_per_turn` groups at a time, waits until all of them are finished, and rests only then.

With a pace, groups end as fast as the trainer takes them, so it never waits after the first one. The first one ends
early, for few others run next to it. For groups that are all alike, planned from the last group backwards, each begins
a group's steps before its end. Invariants of a pace:

- the first group begins with the iteration;
- two ends lie `group_seconds` apart.

Invariants of the choice:

- it is one of `list_numbers`, and never more than the bound;
- a number at which the engine was not seen is at least half of the least number at which it was, and has no pace. So
  an iteration that tries it takes at most twice the steps, and at most twice the time, of sampling with the least
  number seen;
- at a pace, an engine has at least half of the least number seen, after its first groups;
- what runs is kept unless another choice is better by more than `WORTH`;
- a trainer that waits for all groups gets the choice that samples fastest.
"""

import bisect
import dataclasses
import heapq
import math
from collections.abc import Sequence

import numpy as np

from megatron_rl.sidecar.in_flight.curve import StepCurve


@dataclasses.dataclass(frozen=True)
class Begins:
    """The rule by which the groups of an engine begin, one after the other."""

    limits: tuple[int, ...]
    """Groups that may be sampled at once, with the one that begins."""
    delays: tuple[float, ...] = ()
    """Steps before which the first, second, ... group does not begin. The others have no delay."""


def plan_begins(
    num_groups: int, num_steps: float, num_running: float, group_seconds: float, curve: StepCurve
) -> Begins:
    """Plan the begins of an engine's groups, of `num_steps` steps each, so that one ends every `group_seconds`.

    `num_running` responses of a group run in a step, on average.
    """
    step_seconds = curve.step_seconds(num_running * np.arange(num_groups + 1)).tolist()
    ends = plan_ends(num_groups, num_steps, group_seconds, step_seconds)
    begins = [end - num_steps for end in ends]
    limits = tuple(place + 1 - bisect.bisect_right(ends, begin) for place, begin in enumerate(begins))
    # Once groups have ended, the next ones begin when others end.
    return Begins(limits, tuple(begins[: bisect.bisect_left(begins, num_steps)]))


def plan_ends(num_groups: int, num_steps: float, group_seconds: float, step_seconds: Sequence[float]) -> list[float]:
    """Plan the steps at which groups end; `step_seconds` is the time of a step by the number of groups in it."""
    # From the last group backwards, in steps from its end.
    ends = [0.0]
    # Groups whose begin has been passed on the way back.
    num_passed = 0
    for _ in range(num_groups - 1):
        now, left = ends[-1], group_seconds
        # If all of the groups so far begin later, the one to be placed runs alone.
        while num_passed < len(ends):
            begin = ends[num_passed] - num_steps
            seconds = (now - begin) * step_seconds[len(ends) - num_passed]
            if seconds >= left:
                break
            left -= seconds
            now, num_passed = begin, num_passed + 1
        ends.append(now - left / step_seconds[max(1, len(ends) - num_passed)])
    first = ends[-1] - num_steps
    return [end - first for end in reversed(ends)]


@dataclasses.dataclass(frozen=True)
class SamplingWork:
    lengths: Sequence[Sequence[int]]
    """The tokens of each response, by group, in the order in which groups begin."""
    max_running: int
    """The most responses that an engine samples at a time."""
    num_engines: int = 1
    groups_per_turn: int = 1
    """Groups that the trainer takes at a time, over all replicas."""
    num_updates: int = 1
    in_prompt_order: bool = False
    train_seconds: float = 0.0
    """Seconds for which the trainer computes; 0 if it waits for all groups before."""

    @property
    def group_size(self) -> int:
        return max(map(len, self.lengths))


@dataclasses.dataclass(frozen=True)
class Opening:
    """The number of responses that each engine is given at once."""

    num_in_flight: int
    """The most responses."""
    pace: float | None = None
    """The time between two ends of groups, as a share of the time of training on one.

    None if each group begins as soon as the responses in flight leave room for it.
    """
    limits: tuple[int, ...] = ()
    """Groups that an engine may have at once with its first, second, ... group. Later groups have all of the room."""
    delays: tuple[float, ...] = ()
    """Seconds after the start of the iteration before which its first, second, ... group does not begin."""

    def __str__(self) -> str:
        number = f"{self.num_in_flight} responses at once"
        return number if self.pace is None else f"at most {number}, so that groups end at the trainer's pace"

    def count_room(self, num_begun: int, num_open: int, group_size: int) -> int:
        """Return the responses that an engine may have in flight.

        It has begun `num_begun` groups, and `num_open` delays are over.
        """
        if num_begun >= len(self.limits):
            return self.num_in_flight
        is_early = num_open <= num_begun < len(self.delays)
        return min(self.num_in_flight, (self.limits[num_begun] - is_early) * group_size)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The predicted course of an iteration, in seconds from its start."""

    first: float
    """The end of the first group."""
    sampled: float
    """The end of the last group."""
    trained: float
    """The end of training, without updates."""
    opening: Opening
    """The opening for which it is predicted."""


def predict(
    work: SamplingWork, curve: StepCurve, num_in_flight: int, pace: float | None = None, least: int = 1
) -> Forecast:
    """Predict the course of an iteration with at most this number in flight on each engine.

    At a pace, an engine has at least `least` groups at once, after its first ones. Engines are alike and share the
    groups evenly, so one of them stands for all.
    """
    num_engines = min(work.num_engines, len(work.lengths))
    lengths = [np.asarray(one) for one in work.lengths[::num_engines]]
    most = max(1, num_in_flight // work.group_size)
    begins = Begins((most,) * len(lengths))
    if pace is not None:
        num_steps = float(np.mean([one.max() for one in lengths]))
        num_running = sum(float(one.sum()) for one in lengths) / (len(lengths) * num_steps)
        planned = plan_begins(len(lengths), num_steps, num_running, pace * work.train_seconds / len(lengths), curve)
        limits = (max(limit, min(least, place + 1)) for place, limit in enumerate(planned.limits))
        begins = Begins(tuple(min(most, limit) for limit in limits), planned.delays)
    starts, ends, finished = _place(lengths, begins, work.max_running)
    changes = np.concatenate([starts, ends])
    order = np.argsort(changes, kind="stable")
    steps = np.concatenate([[0.0], changes[order]])
    running = np.concatenate([[0.0], np.cumsum(np.repeat([1.0, -1.0], len(starts))[order])])[:-1]
    seconds = np.concatenate([[0.0], np.cumsum(np.diff(steps) * curve.step_seconds(running))])
    ended = np.interp(finished, steps, seconds)
    opening = Opening(num_in_flight)
    if pace is not None:
        delays = tuple(np.interp(begins.delays, steps, seconds).tolist())
        opening = Opening(min(num_in_flight, max(begins.limits) * work.group_size), pace, begins.limits, delays)
    return Forecast(
        first=float(ended.min()),
        sampled=float(ended.max()),
        trained=_train(work, ended, num_engines),
        opening=opening,
    )


def _place(
    lengths: Sequence[np.ndarray], begins: Begins, max_running: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps at which responses start and end, and at which groups are finished."""
    # The steps at which room for a group opens. Room that is free opens in the past.
    room: list[float] = []
    # Whether responses may wait for others within the engine.
    is_crowded = max(begins.limits) * max(map(len, lengths)) > max_running
    free = [0.0] * max_running
    begin, starts, finished = 0.0, [], []
    for index, (one, limit) in enumerate(zip(lengths, begins.limits, strict=True)):
        while len(room) < limit:
            heapq.heappush(room, begins.delays[index] if index < len(begins.delays) else begin)
        while len(room) > limit:
            heapq.heappop(room)
        begin = max(begin, heapq.heappop(room))
        if is_crowded:
            start = np.empty(len(one))
            for place, length in enumerate(one.tolist()):
                start[place] = max(begin, free[0])
                heapq.heapreplace(free, start[place] + length)
        else:
            start = np.full(len(one), begin)
        starts.append(start)
        finished.append(float((start + one).max()))
        heapq.heappush(room, finished[-1])
    every = np.concatenate(starts)
    return every, every + np.concatenate(lengths), np.array(finished)


def _train(work: SamplingWork, ended: np.ndarray, num_engines: int) -> float:
    """Return when the trainer is done, with groups that end at these times on each of the engines."""
    count = len(ended)
    of_turn = max(1, work.groups_per_turn // num_engines)
    num_updates = min(work.num_updates, count)
    done = 0.0
    for update in np.array_split(ended, num_updates):
        taken = update if work.in_prompt_order else np.sort(update)
        arrived = np.maximum.reduceat(taken, np.arange(0, len(taken), of_turn))
        left = len(taken) - np.arange(0, len(taken), of_turn)
        done = float(np.max(np.maximum(arrived, done) + left * work.train_seconds / count))
    return done


# The gain for which a choice is changed.
WORTH = 0.01
# Between two ends of groups, the shares of a group's training that are tried.
PACES = (1.1, 1.0, 0.9, 0.8)
# Numbers tried in a factor of two.
_DENSITY = 3


def list_numbers(group_size: int, most: int, num_groups: int) -> list[int]:
    """List the numbers of responses in flight to choose from, the largest first: the bound, and multiples of groups."""
    whole = min(max(1, most // group_size), num_groups)
    steps = range(math.ceil(_DENSITY * math.log2(whole)) + 1)
    counts = dict.fromkeys(max(1, round(whole / 2 ** (step / _DENSITY))) for step in steps)
    return [most, *(count * group_size for count in counts if count * group_size < min(most, num_groups * group_size))]


def choose(work: SamplingWork, curve: StepCurve, most: int, current: Opening) -> Forecast:
    """Choose the opening of each engine, with at most `most` responses in flight, and predict the iteration with it."""
    num_groups = math.ceil(len(work.lengths) / work.num_engines)
    least = math.ceil(curve.least_known / 2 / work.group_size)
    now = predict(work, curve, most if current.pace else current.num_in_flight, current.pace, least)
    found = now
    for number in list_numbers(work.group_size, most, num_groups):
        if 2 * min(number, work.max_running) < curve.least_known:
            break
        found = _better(found, predict(work, curve, number))
    for pace in PACES if work.train_seconds else ():
        forecast = predict(work, curve, most, pace, least)
        if min(forecast.opening.num_in_flight, work.max_running) >= curve.least_known:
            found = _better(found, forecast)
    return found if found.trained < (1 - WORTH) * now.trained else now


def _better(one: Forecast, other: Forecast) -> Forecast:
    return other if other.trained < one.trained else one
