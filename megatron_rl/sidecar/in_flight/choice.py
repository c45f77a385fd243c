"""The choice of the number of responses in flight: the one with which training is predicted to end first.

Invariants:

- the choice is one of `list_numbers`, and never more than the bound;
- a number at which the engine was not seen is at least half of the least number at which it was, and has no pace. So
  an iteration that tries it takes at most twice the steps, and at most twice the time, of sampling with the least
  number seen;
- at a pace, an engine has at least half of the least number seen, after its first groups;
- what runs is kept unless another choice is better by more than `WORTH`;
- a trainer that waits for all groups gets the choice that samples fastest.
"""

import math

from megatron_rl.sidecar.in_flight.curve import StepCurve
from megatron_rl.sidecar.in_flight.forecast import Forecast, Opening, SamplingWork, predict

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
