"""Measure the gain of each `--rollout-tail` where lengths have a long tail, in the time of a simulated engine.

The engine samples a fixed number of responses at once, a token of each in a step. Lengths have a long tail, and a step
takes the same time for many responses as for few. The sidecar's own iteration decides which responses are trained on.
`carry` is the tail batching of RollPacker (arXiv 2509.21009) without its other parts. Beside ours stand:

- prompts put off to the very next iteration: the simplest way;
- verl's fully asynchronous training with partial rollouts: engines never wait, and a response continues with newer
  weights. That takes the least time of all, and is not on-policy.
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks import report
from megatron_rl.shared.protocol.wire import Tail
from megatron_rl.sidecar.iteration import Iteration
from tests.submissions import make_group, make_plan, make_submission

NUM_PROMPTS, GROUP_SIZE, NUM_ITERATIONS = 64, 8, 40
NUM_AT_ONCE = NUM_PROMPTS * GROUP_SIZE * 5 // 4
"""Responses: an iteration with its spare prompts fits."""
NUM_TAIL = NUM_PROMPTS // 8
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 1000.0, 0.9, 16384


class _Lengths:
    """Lengths of the responses to a prompt: some prompts are answered at length, whichever version answers."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def draw_prompt(self) -> float:
        """Return the length that its responses lie around."""
        return MEDIAN_TOKENS * self._draw.lognormvariate(0.0, SPREAD / 2)

    def draw_group(self, around: float) -> list[int]:
        lengths = (around * self._draw.lognormvariate(0.0, SPREAD) for _ in range(GROUP_SIZE))
        return [min(max(round(length), 1), MOST_TOKENS) for length in lengths]


class _Tally:
    """The tally of a way: steps of each iteration, and the responses that were trained on."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.trained: list[int] = []
        """Lengths of responses."""
        self.num_sampled = 0
        """Tokens, also those that were thrown away."""

    def add(self, steps: float, trained: Iterable[int], num_sampled: int) -> None:
        self.steps.append(steps)
        self.trained += trained
        self.num_sampled += num_sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    num_iterations = 4 if parser.parse_args().tiny else NUM_ITERATIONS
    tallies = {
        "stop": _ours("stop", num_iterations),
        "truncate": _ours("truncate", num_iterations),
        "carry": _ours("carry", num_iterations),
        "put off by one": _put_off_by_one(num_iterations),
        "partial, off-policy": _never_wait(num_iterations),
    }
    report.table("steps of an iteration", {name: tally.steps for name, tally in tallies.items()}, "")
    means = {name: [statistics.mean(tally.steps)] for name, tally in tallies.items()}
    report.table("their mean", means, "")
    means = {name: [statistics.mean(tally.trained)] for name, tally in tallies.items()}
    report.table("mean length trained on", means, "tokens")
    sampled = {name: [tally.num_sampled / sum(tally.trained)] for name, tally in tallies.items()}
    report.table("tokens sampled over trained on", sampled, "")
    stop = tallies["stop"]
    report.finish(
        {f"{name}_vs_stop": _ratio(tallies[key].steps, stop.steps) for name, key in _NAMES.items()}
        | {f"{name}_length": _ratio(tallies[key].trained, stop.trained) for name, key in _NAMES.items()}
    )


_NAMES = {
    "truncate": "truncate",
    "carry": "carry",
    "by_one": "put off by one",
    "partial": "partial, off-policy",
}


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.mean(ours) / statistics.mean(theirs)


def _ours(tail: Tail, num_iterations: int) -> _Tally:
    """Simulate an engine that has room for all: each group ends with its longest response."""
    lengths, tally = _Lengths(0), _Tally()
    plan = make_plan(
        num_prompts=NUM_PROMPTS, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE, tail=tail,
        num_tail=0 if tail == "stop" else NUM_TAIL,
    )  # fmt: skip
    gathered: list[float] = []
    for _ in range(num_iterations):
        num_carried = plan.count_carried(len(gathered))
        num_fresh = plan.count_submitted(num_carried) - num_carried
        prompts = gathered[:num_carried] + [lengths.draw_prompt() for _ in range(num_fresh)]
        groups = [lengths.draw_group(around) for around in prompts]
        iteration = Iteration(make_submission(plan, num_carried=num_carried))
        running = _begin(iteration, groups)
        now = 0
        while running:
            now, prompt = heapq.heappop(running)
            iteration.finished(make_group(iteration.submission, prompt, 1))
            running = [(end, one) for end, one in running if iteration.is_wanted(one)]
            heapq.heapify(running)
            if tail == "truncate" and len(running) <= NUM_TAIL:
                break
        for _, prompt in running:
            iteration.finished(make_group(iteration.submission, prompt, 1))
        for slot in range(NUM_PROMPTS):
            iteration.claim(0, slot)
        dropped = set(iteration.census().put_off)
        gathered = gathered[num_carried:] + [prompts[prompt] for prompt in sorted(dropped)]
        sampled = [[min(length, now) for length in group] for group in groups]
        trained = [length for prompt, group in enumerate(sampled) if prompt not in dropped for length in group]
        tally.add(now, trained, sum(map(sum, sampled)))
    return tally


def _begin(iteration: Iteration, groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    running = []
    while (prompt := iteration.next_prompt()) is not None:
        running.append((max(groups[prompt.index]), prompt.index))
    heapq.heapify(running)
    return running


def _put_off_by_one(num_iterations: int) -> _Tally:
    lengths, tally = _Lengths(0), _Tally()
    put_off: list[float] = []
    for _ in range(num_iterations):
        prompts = put_off + [lengths.draw_prompt() for _ in range(NUM_PROMPTS + NUM_TAIL - len(put_off))]
        groups = [lengths.draw_group(around) for around in prompts]
        num_kept = len(put_off)
        by_length = sorted(range(num_kept, len(groups)), key=lambda prompt: max(groups[prompt]))
        chosen = [*range(num_kept), *by_length[: NUM_PROMPTS - num_kept]]
        steps = max(max(groups[prompt]) for prompt in chosen)
        put_off = [prompts[prompt] for prompt in by_length[NUM_PROMPTS - num_kept :]]
        sampled = [[min(length, steps) for length in group] for group in groups]
        tally.add(steps, [length for prompt in chosen for length in sampled[prompt]], sum(map(sum, sampled)))
    return tally


def _never_wait(num_iterations: int) -> _Tally:
    """Sample all responses one after the other, with room for all responses of one of our iterations."""
    lengths, tally = _Lengths(0), _Tally()
    groups = [lengths.draw_group(lengths.draw_prompt()) for _ in range(num_iterations * NUM_PROMPTS)]
    flat = [length for group in groups for length in group]
    free = [0] * (NUM_PROMPTS * GROUP_SIZE)
    for length in flat:
        heapq.heapreplace(free, free[0] + length)
    steps = float(np.mean(free)) / num_iterations
    for number in range(num_iterations):
        trained = flat[number * NUM_PROMPTS * GROUP_SIZE : (number + 1) * NUM_PROMPTS * GROUP_SIZE]
        tally.add(steps, trained, sum(trained))
    return tally


if __name__ == "__main__":
    main()
