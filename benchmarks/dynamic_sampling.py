"""Simulate the sampling time of an iteration in which half of the groups have no signal.

The simulated engine samples a fixed number of groups at once, each until its longest response ends; lengths have a long
tail. The sidecar's own iteration decides what is sampled next. Three ways are compared: the number of prompts ahead
that the iteration before needed; none ahead; and whole batches, each begun when the one before it has ended, until
there are enough.
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Callable

from benchmarks import report
from megatron_rl.sidecar.iteration import Iteration
from tests.submissions import make_group, make_plan, make_submission

NUM_PROMPTS, GROUP_SIZE, NUM_ITERATIONS = 64, 8, 12
WITHOUT_SIGNAL = 0.5
MEDIAN_TOKENS, SPREAD = 400.0, 0.8
Times = tuple[float, int]
"""Steps of the engine until the iteration had all its groups, and the number of groups begun by then."""
_Seen = tuple[int, int]
"""The number of groups without a signal, and of all that were considered."""


class _World:
    """The groups of an iteration: their signals, and the steps of the engine that they take."""

    def __init__(self, seed: int, count: int) -> None:
        draw = random.Random(seed)
        self.signals = [draw.random() >= WITHOUT_SIGNAL for _ in range(count)]
        self.steps = [
            max(MEDIAN_TOKENS * draw.lognormvariate(0.0, SPREAD) for _ in range(GROUP_SIZE)) for _ in range(count)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    num_iterations = 3 if parser.parse_args().tiny else NUM_ITERATIONS
    figures = {}
    for name, num_at_once in (("wide", 2 * NUM_PROMPTS), ("narrow", NUM_PROMPTS // 4)):
        ways = (_sample, _none_ahead, _whole_batches)
        ahead, none, batches = (_run(way, num_at_once, num_iterations) for way in ways)
        print(f"\nan engine of {num_at_once} groups at once, {NUM_PROMPTS} groups with a signal wanted")
        steps = {
            "none ahead": [steps for steps, _ in none],
            "whole batches": [steps for steps, _ in batches],
            "ahead": [steps for steps, _ in ahead],
        }
        report.table("steps of the engine", steps, "")
        report.table("groups begun", {"ahead": [n for _, n in ahead], "none ahead": [n for _, n in none]}, "")
        figures[f"ahead_vs_none_{name}"] = _ratio(ahead, none)
        figures[f"ahead_vs_batches_{name}"] = _ratio(ahead, batches)
        figures[f"begun_vs_needed_{name}"] = statistics.median(
            begun / needed for (_, begun), (_, needed) in zip(ahead, none, strict=True)
        )
    report.finish(figures)


def _ratio(ours: list[Times], theirs: list[Times]) -> float:
    return statistics.median(one / other for (one, _), (other, _) in zip(ours, theirs, strict=True))


def _run(way: Callable[[_World, int, _Seen], tuple[Times, _Seen]], num_at_once: int, count: int) -> list[Times]:
    found: list[Times] = []
    before = (0, 0)
    for seed in range(count + 1):
        times, before = way(_World(seed, 4 * NUM_PROMPTS), num_at_once, before)
        # The first iteration knows of none before it.
        if seed:
            found.append(times)
    return found


def _none_ahead(world: _World, num_at_once: int, before: _Seen) -> tuple[Times, _Seen]:
    times, _ = _sample(world, num_at_once, None)
    return times, before


def _sample(world: _World, num_at_once: int, before: _Seen | None) -> tuple[Times, _Seen]:
    plan = make_plan(
        num_prompts=NUM_PROMPTS, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE,
        num_spare=3 * NUM_PROMPTS,
    )  # fmt: skip
    iteration = Iteration(make_submission(plan), before=before)
    running: list[tuple[float, int]] = []
    now, num_begun = 0.0, 0
    while True:
        while len(running) < num_at_once and (prompt := iteration.next_prompt()) is not None:
            heapq.heappush(running, (now + world.steps[prompt.index], prompt.index))
            num_begun += 1
        running = [(end, index) for end, index in running if iteration.is_wanted(index)]
        if not running:
            break
        heapq.heapify(running)
        now, index = heapq.heappop(running)
        iteration.finished(make_group(iteration.submission, index, 1, has_signal=world.signals[index]))
    for slot in range(NUM_PROMPTS):
        iteration.claim(0, slot)
    census = iteration.census()
    return (now, num_begun), (census.num_without_signal, census.num_considered)


def _whole_batches(world: _World, num_at_once: int, before: _Seen) -> tuple[Times, _Seen]:
    now, num_found, first = 0.0, 0, 0
    while num_found < NUM_PROMPTS and first < len(world.steps):
        batch = range(first, first + NUM_PROMPTS)
        free = [now] * num_at_once
        for prompt in batch:
            heapq.heapreplace(free, free[0] + world.steps[prompt])
        now = max(free)
        num_found += sum(world.signals[prompt] for prompt in batch)
        first += NUM_PROMPTS
    return (now, first), before


if __name__ == "__main__":
    main()
