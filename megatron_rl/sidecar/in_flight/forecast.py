"""The predicted course of an iteration, for a number of responses in flight.

Every running response gets a token in every step. So the order of events is computed in steps, with no time in it, and
one sum over steps turns it into seconds. Invariants:

- groups begin in order; each begins as soon as its delay has passed and the responses in flight leave room for it;
- of the responses in flight at most `max_running` run, those that began first;
- a group is finished with its longest response;
- the trainer takes `groups_per_turn` groups at a time, waits until all of them are finished, and rests only then.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from megatron_rl.sidecar.in_flight.curve import StepCurve


@dataclasses.dataclass(frozen=True)
class SamplingWork:
    """The work of an iteration."""

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
    """The number of responses that each engine is given at once, and the way to that number."""

    num_in_flight: int
    ramp: float = 0.0
    """The time over which the first groups begin, evenly, as a share of the steps of a mean group."""
    delays: tuple[float, ...] = ()
    """Seconds after the start of the iteration from which on an engine has room for 1, 2, 3, ... groups.

    Empty if it has all of its room at once.
    """

    def __str__(self) -> str:
        over = f", the first ones over {self.delays[-1]:.3g} s" if self.delays else ""
        return f"{self.num_in_flight} responses at once{over}"

    def count_room(self, seconds: float, group_size: int) -> int:
        """Return the number of responses that an engine may have in flight after these seconds."""
        num_open = sum(delay <= seconds for delay in self.delays)
        return self.num_in_flight if num_open == len(self.delays) else num_open * group_size


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The predicted course of an iteration, in seconds from its start."""

    first: float
    """The end of the first group."""
    sampled: float
    """The end of the last group."""
    trained: float
    """The end of training, without updates."""
    delays: tuple[float, ...] = ()
    """As in `Opening`."""


def predict(work: SamplingWork, num_in_flight: int, ramp: float, curve: StepCurve) -> Forecast:
    """Predict the course of an iteration.

    Engines are alike and share the groups evenly, so one of them stands for all.
    """
    num_engines = min(work.num_engines, len(work.lengths))
    lengths = [np.asarray(one) for one in work.lengths[::num_engines]]
    num_at_once = max(1, num_in_flight // work.group_size)
    mean_steps = float(np.mean([one.max() for one in lengths]))
    num_opening = min(num_at_once, len(lengths)) if ramp else 0
    delays = [ramp * mean_steps * place / num_opening for place in range(num_opening)]
    begun, starts, ends, finished = _place(lengths, num_at_once, delays, work.max_running)
    changes = np.concatenate([starts, ends])
    order = np.argsort(changes, kind="stable")
    steps = np.concatenate([[0.0], changes[order]])
    running = np.concatenate([[0.0], np.cumsum(np.repeat([1.0, -1.0], len(starts))[order])])[:-1]
    seconds = np.concatenate([[0.0], np.cumsum(np.diff(steps) * curve.step_seconds(running))])
    ended = np.interp(finished, steps, seconds)
    return Forecast(
        first=float(ended.min()),
        sampled=float(ended.max()),
        trained=_train(work, ended, num_engines),
        delays=tuple(np.interp(begun[:num_opening], steps, seconds).tolist()),
    )


def _place(
    lengths: Sequence[np.ndarray], num_at_once: int, delays: Sequence[float], max_running: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the steps at which groups begin, at which responses start and end, and at which groups are finished."""
    room = [*delays, *([0.0] * (num_at_once - len(delays)))]
    heapq.heapify(room)
    # Whether responses may wait for others within the engine.
    is_crowded = num_at_once * max(map(len, lengths)) > max_running
    free = [0.0] * max_running
    begun, starts, finished = [], [], []
    for one in lengths:
        begin = heapq.heappop(room)
        if is_crowded:
            start = np.empty(len(one))
            for place, length in enumerate(one.tolist()):
                start[place] = max(begin, free[0])
                heapq.heapreplace(free, start[place] + length)
        else:
            start = np.full(len(one), begin)
        begun.append(begin)
        starts.append(start)
        finished.append(float((start + one).max()))
        heapq.heappush(room, finished[-1])
    every = np.concatenate(starts)
    return np.array(begun), every, every + np.concatenate(lengths), np.array(finished)


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
