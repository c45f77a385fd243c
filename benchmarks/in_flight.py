"""Measure what the chosen number of responses in flight gains, with the service's own code in virtual time.

Scripted engines sample step by step; a step with n responses takes a fixed time and a time for each response. A trainer
takes slots as ours does. All waits are timers, so one clock jumps from one to the next, and the figures are exact.

Where all responses of an iteration fit into an engine at once, groups of one length end together and nothing overlaps.
Ideal is the longer of training and of sampling everything at once, as in `overlap`. No order of groups reaches it.
`bound_seconds` is a time that no order can be below, for groups of one length.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from benchmarks import report
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight.choice import list_numbers
from megatron_rl.sidecar.in_flight.forecast import Opening
from tests.paced_run import Case, PacedIteration, run_paced

# vLLM on one core of a CPU, a model of two layers and 256 hidden units: milliseconds of a step, and of each response in
# it. From 16 to 1,024 responses, the line is within 7 % of what was measured in CPU time.
STEP_MS, RESPONSE_MS = 3.3, 0.094
LOADS = {"half": 0.5, "one": 1.0, "double": 2.0}
"""Training over generation."""
# Iterations until choices have settled, and those that count.
NUM_FIRST, NUM_SETTLED = 8, 8


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of the benchmark."""

    num_prompts: int = 128
    num_first: int = NUM_FIRST
    num_settled: int = NUM_SETTLED
    density: int = 3
    """Every nth of the fixed numbers is tried."""


TINY = Size(num_prompts=16, num_first=4, num_settled=2, density=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    size = TINY if parser.parse_args().tiny else Size()
    report.finish(_measure_loads(size) | _measure_settings(size))


def _measure_loads(size: Size) -> dict[str, float]:
    """Compare one wave with its ideal and its bound."""
    figures, rows = {}, {}
    over_bound = []
    for name, load in LOADS.items():
        one = _load(_one_wave(size), load)
        ideal, bound = _ideal_seconds(one), bound_seconds(one)
        chosen = run_paced(one, size.num_first + size.num_settled)
        settled = _median_seconds(chosen[size.num_first :])
        rows |= {
            f"training / generation {load:g}, all at once": [chosen[0].seconds / ideal],
            f"training / generation {load:g}, chosen": [settled / ideal],
            f"training / generation {load:g}, bound": [bound / ideal],
        }
        figures |= {f"over_ideal_{name}": settled / ideal, f"at_once_over_ideal_{name}": chosen[0].seconds / ideal}
        over_bound.append(settled / bound)
    report.table("one wave: an iteration / its ideal", rows, "")
    return figures | {"over_bound_worst": max(over_bound)}


def _measure_settings(size: Size) -> dict[str, float]:
    """Compare chosen numbers with the best fixed one."""
    rows, worst, trying = {}, [], []
    for name, case in _settings(size).items():
        numbers = list_numbers(case.group_size, case.most, case.num_prompts)[:: size.density]
        fixed = {number: _median_seconds(run_paced(case, size.num_settled, Opening(number))) for number in numbers}
        chosen = run_paced(case, size.num_first + size.num_settled)
        ratio = _median_seconds(chosen[size.num_first :]) / min(fixed.values())
        best = min(fixed, key=lambda number: fixed[number])
        rows[f"{name} (best {best}, chosen {chosen[-1].opening.num_in_flight})"[:70]] = [ratio]
        worst.append(ratio)
        trying.append(max(one.seconds for one in chosen) / chosen[0].seconds)
    report.table("chosen / the best fixed number", rows, "")
    return {"chosen_vs_best_fixed_worst": max(worst), "trying_vs_first_worst": max(trying)}


def _one_wave(size: Size) -> Case:
    """Return an iteration whose responses fit into an engine at once, and have one length."""
    costs = StepCosts(1e-3 * STEP_MS, 1e-3 * RESPONSE_MS, max_running=8 * size.num_prompts)
    return Case(costs, size.num_prompts, 8, lengths=(100, 100), train_seconds=0.0)


def _settings(size: Size) -> Mapping[str, Case]:
    """Return the settings in which chosen and fixed numbers are compared."""
    num_prompts = size.num_prompts // 4
    wave = dataclasses.replace(_one_wave(dataclasses.replace(size, num_prompts=num_prompts)), lengths=(20, 180))
    few = dataclasses.replace(wave.costs, max_running=wave.costs.max_running // 8)
    two = dataclasses.replace(wave.costs, max_running=wave.costs.max_running // 2)
    bound = dataclasses.replace(wave.costs, step=wave.costs.max_running * wave.costs.per_response)
    cases = {
        "one length": (dataclasses.replace(wave, lengths=(100, 100)), 1.0),
        "one length, little training": (dataclasses.replace(wave, lengths=(100, 100)), 0.5),
        "lengths that differ": (wave, 1.0),
        "much training": (wave, 2.0),
        "eight waves": (dataclasses.replace(wave, costs=few), 1.0),
        "two engines": (dataclasses.replace(wave, costs=two, num_engines=2), 1.0),
        "prompt order, two groups a slot": (dataclasses.replace(wave, order="prompt", groups_per_slot=2), 1.0),
        "steps half of which never change": (dataclasses.replace(wave, costs=bound), 1.0),
    }
    return {name: _load(case, load) for name, (case, load) in cases.items()}


def _load(case: Case, load: float) -> Case:
    """Return the iteration with so much training for the time of sampling as fast as possible."""
    return dataclasses.replace(case, train_seconds=load * _generation_seconds(case))


def _generation_seconds(case: Case) -> float:
    return run_paced(dataclasses.replace(case, train_seconds=0.0), 1, Opening(case.most))[0].seconds


def _ideal_seconds(case: Case) -> float:
    return max(_generation_seconds(case), case.train_seconds)


def _median_seconds(iterations: Sequence[PacedIteration]) -> float:
    return statistics.median(one.seconds for one in iterations)


def bound_seconds(case: Case) -> float:
    """Return seconds that an iteration takes at least, in whatever order and at whatever times its groups begin.

    Groups have one length, one engine holds all of them, and the trainer takes one at a time. Let a be a step's fixed
    seconds for all steps of a group, b the seconds for the tokens of all N groups, and T those of training. With n(x)
    the share of all groups that runs at step x, in lengths of a group, the end is at least each of:

    1. a + b / N + T: the first group, alone, and then training;
    2. a * S + b + T / N: all S lengths of steps, all tokens, and the last group's training;
    3. the mean, over groups in the order of their ends, of a group's end and the training of those not before it. If
       two groups overlap by o lengths, o of the second has been made at the end of the first. So the mean is
       a / 2 + b / 2 + a * (integral of x * n) + b / 2 * (integral of n^2) + T * (N + 1) / 2N. It is least for
       n = (l - a * x) / b, where l makes the integral of n 1.

    With S, which is at most N, the second rises and the third falls. So both hold where they meet.
    """
    length, count = case.lengths[1], case.num_prompts
    fixed = case.costs.step * length
    tokens = case.costs.per_response * case.group_size * count * length
    train = case.train_seconds
    mean_of_turns = train * (count + 1) / (2 * count)

    def least(lengths: float) -> float:
        last = fixed * lengths + tokens + train / count
        level = math.sqrt(2 * fixed * tokens)
        end = level / fixed
        if end > lengths:
            level, end = (tokens + fixed * lengths**2 / 2) / lengths, lengths
        center = (level * end**2 / 2 - fixed * end**3 / 3) / tokens
        square = (level**2 * end - level * fixed * end**2 + fixed**2 * end**3 / 3) / tokens**2
        return max(last, fixed / 2 + tokens / 2 + fixed * center + tokens / 2 * square + mean_of_turns)

    # Between two lengths that are tried, the least is at most a step of the fixed part below.
    tried = [1 + place / 200 for place in range(200 * count)]
    found = min(least(lengths) for lengths in tried) - fixed / 200
    return max(fixed + tokens / count + train, found)


if __name__ == "__main__":
    main()
