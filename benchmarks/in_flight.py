"""Measure what the chosen number of responses in flight gains, with the service's own code in virtual time.

Scripted engines sample step by step; a step with n responses takes a fixed time and a time for each response. A trainer
takes slots as ours does. All waits are timers, so one clock jumps from one to the next, and the figures are exact.

Where all responses of an iteration fit into an engine at once, groups of one length end together and nothing overlaps.
Ideal is the longer of training and of sampling everything at once, as in `overlap`. No order of groups reaches it.
`bound_seconds` is a time that no order can be below, for groups of one length, and `bound_over_ideal_*` compares it.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import report
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight.forecast import Opening, list_numbers
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
    figures: dict[str, float] = {}
    rows: dict[str, list[float]] = {}
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
        figures |= {
            f"over_ideal_{name}": settled / ideal,
            f"bound_over_ideal_{name}": bound / ideal,
            f"at_once_over_ideal_{name}": chosen[0].seconds / ideal,
        }
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


def bound_seconds(case: Case, num_tried: int = 4000) -> float:
    """Return seconds that an iteration takes at least, in whatever order and at whatever steps its groups begin.

    Groups have one length of L steps, one engine holds all N of them, and the trainer takes one at a time, for T / N
    seconds. Let B(i) be the groups that have begun by step i. A step takes a seconds, and c for each group in it. So a
    group that begins with step i ends after

        t(i) = a (i + L) + c (B(i) + B(i + 1) + ... + B(i + L - 1))

    seconds, for each group that has begun by then has run for a group's steps, or fewer. At that time the trainer still
    has this group and all later ones to train on, so the iteration takes M >= t(i) + (N - B(i - 1)) T / N. This holds
    for each step i up to X, the last with which a group begins: if none begins with i, the right side is larger for the
    next step with which one does.

    Read backwards, B(i - 1) >= N - (M - t(i)) N / T is a least number of groups, by those for later steps; and B is N
    from X on. M is possible only if the least B(-1) is at most 0. Counted back from X, these numbers depend on
    M - a X alone. So each M - a X, of which `num_tried` are tried, has its least X, and the sum is least for one.
    """
    length, count, train = case.lengths[1], case.num_prompts, case.train_seconds
    step, of_group = case.costs.step, case.costs.per_response * case.group_size
    alone = length * (step + of_group) + train
    together = length * (step + of_group * count) + train / count
    if not train:
        return together
    tried = np.linspace(together, together + train, num_tried + 1)
    # The least numbers of groups, back from those that have begun by the last of the steps in `window`.
    window = np.full((length, len(tried)), float(count))
    num_in_window = window.sum(axis=0)
    last = np.full(len(tried), (count - 1) * length)
    for back in range((count - 1) * length + 1):
        ends = step * (length - back) + of_group * num_in_window
        least = np.clip(count - (tried - ends) * count / train, 0, count)
        last = np.where(least <= 0, np.minimum(last, back), last)
        if last.max() <= back:
            break
        num_in_window += least - window[back % length]
        window[back % length] = least
    # Between two that are tried, the sum is at least the lesser one and the steps of the larger one.
    return max(alone, float(np.min(tried[:-1] + step * last[1:])))


if __name__ == "__main__":
    main()
