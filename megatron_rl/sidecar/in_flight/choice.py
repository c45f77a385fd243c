"""The choice of the number of responses in flight: the one with which training is predicted to end first.

Invariants:

- the choice is one of `list_numbers`, and never more than the bound;
- a number at which the engine was not seen is at least half of the least number at which it was, and has no ramp. So
  an iteration that tries it takes at most twice the steps, and at most twice the time, of sampling with the least
  number seen;
- what runs is kept unless another choice is better by more than `WORTH`;
- a trainer that waits for all groups gets the choice that samples fastest.
"""

import dataclasses
import math
from collections.abc import Iterable

from megatron_rl.sidecar.in_flight.curve import StepCurve
from megatron_rl.sidecar.in_flight.forecast import Forecast, Opening, SamplingWork, predict

# The gain for which a choice is changed.
WORTH = 0.01
# The ramps tried with the best number, beside none and the steps of a mean group.
RAMPS = (0.25, 0.5, 0.75)
# Numbers tried in a factor of two.
_DENSITY = 3


def list_numbers(group_size: int, most: int, num_groups: int) -> list[int]:
    """List the numbers of responses in flight to choose from, the largest first: the bound, and multiples of groups."""
    whole = min(max(1, most // group_size), num_groups)
    steps = range(math.ceil(_DENSITY * math.log2(whole)) + 1)
    counts = dict.fromkeys(max(1, round(whole / 2 ** (step / _DENSITY))) for step in steps)
    return [most, *(count * group_size for count in counts if count * group_size < min(most, num_groups * group_size))]


def choose(work: SamplingWork, curve: StepCurve, most: int, current: Opening) -> tuple[Opening, Forecast]:
    """Choose the number of responses in flight on each engine, at most `most`, and predict the iteration with it."""
    num_groups = math.ceil(len(work.lengths) / work.num_engines)
    best, least, margin = current, predict(work, current.num_in_flight, current.ramp, curve), 1 - WORTH

    def consider(number: int, ramps: Iterable[float]) -> None:
        nonlocal best, least, margin
        for ramp in ramps:
            forecast = predict(work, number, ramp, curve)
            if forecast.trained < margin * least.trained:
                best, least, margin = Opening(number, ramp), forecast, 1.0

    for number in list_numbers(work.group_size, most, num_groups):
        running = min(number, work.max_running)
        if 2 * running < curve.least_known:
            break
        consider(number, (0.0, 1.0) if running >= curve.least_known else (0.0,))
    if min(best.num_in_flight, work.max_running) >= curve.least_known:
        consider(best.num_in_flight, RAMPS)
    return dataclasses.replace(best, delays=least.delays), least
