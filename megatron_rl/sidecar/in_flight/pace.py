"""The begins with which groups end at the trainer's pace, for groups that are all alike.

If groups end as fast as the trainer takes them, it never waits after the first one. The first one ends early, for few
others run beside it. Planned from the last group backwards, each group begins a group's steps before its end.
Invariants:

- the first group begins with the iteration;
- two ends lie `group_seconds` apart.
"""

import bisect
import dataclasses
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
