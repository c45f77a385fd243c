"""Drive the planner's engines by SimPy's event loop and by the planner's own, and compare CPU seconds.

    pip install simpy==4.1.2
    python -m benchmarks.plan_simpy [--iterations 10]

512 engines sample the groups of 4,096 devices' iterations. Engines compute in closed form in both; only the event
loop that waits for their next group differs. Both must end at the same simulated time.
"""

import argparse
import heapq
import math
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import simpy

from benchmarks.plan import large_run
from megatron_rl.analysis.plan.costs import BatchingCosts
from megatron_rl.analysis.plan.engines import SimulatedBatching, SimulatedGroup
from megatron_rl.analysis.plan.pool import Pool

SETTING, COSTS = large_run()
PAUSE = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10)
    count = parser.parse_args().iterations
    ends = []
    for name, run in (("the planner's own", run_own), ("SimPy", run_simpy)):
        begun = time.process_time()
        ends.append(run(count))
        print(f"{name:<20}{time.process_time() - begun:>8.2f} CPU s, until {ends[-1]!r}")
    assert ends[0] == ends[1]


def draw_groups(generator: np.random.Generator) -> list[SimulatedGroup]:
    prompts = SETTING.prompts.draw(generator, SETTING.num_prompts, 1)
    responses = SETTING.responses.draw(generator, SETTING.num_prompts, SETTING.group_size)
    return [
        SimulatedGroup(index, 0, prompt, lengths)
        for index, ((prompt,), lengths) in enumerate(zip(prompts, responses, strict=True))
    ]


def make_engines() -> list[SimulatedBatching]:
    assert isinstance(COSTS.engine, BatchingCosts)
    return [SimulatedBatching(COSTS.engine) for _ in range(SETTING.num_engines)]


def run_own(count: int) -> float:
    generator, now = np.random.default_rng(0), 0.0
    pool = Pool(make_engines(), COSTS.engine.max_in_flight, 0.0, 1)
    for _ in range(count):
        groups = draw_groups(generator)
        pool.submit(groups, now)
        now = max(group.finished for group in pool.take(len(groups))) + PAUSE
    return now


def run_simpy(count: int) -> float:
    environment = simpy.Environment()
    process = environment.process(_Simulated(environment).iterate(count))
    environment.run(until=process)
    return float(environment.now)


class _Simulated:
    """A process for each engine, which waits for its next group or for being given one."""

    def __init__(self, environment: simpy.Environment) -> None:
        self._environment = environment
        self._engines = make_engines()
        self._given = [environment.event() for _ in self._engines]
        self._in_flight = [0] * len(self._engines)
        self._free = [(0, index) for index in range(len(self._engines))]
        self._waiting: deque[SimulatedGroup] = deque()
        self._num_left = 0
        self._over = environment.event()
        for index in range(len(self._engines)):
            environment.process(self._sample(index))

    def iterate(self, count: int) -> Iterator[simpy.Event]:
        generator = np.random.default_rng(0)
        for _ in range(count):
            groups = draw_groups(generator)
            self._num_left, self._over = len(groups), self._environment.event()
            self._waiting.extend(groups)
            self._dispatch()
            yield self._over
            yield self._environment.timeout(PAUSE)

    def _sample(self, index: int) -> Iterator[simpy.Event]:
        engine, environment = self._engines[index], self._environment
        while True:
            end = engine.peek()
            idle = environment.event() if end == math.inf else environment.timeout(max(0.0, end - environment.now))
            yield idle | self._given[index]
            if self._given[index].triggered:
                self._given[index] = environment.event()
            if engine.peek() <= environment.now:
                group = engine.take()
                self._change(index, -len(group.lengths))
                self._num_left -= 1
                self._dispatch()
                if not self._num_left:
                    self._over.succeed()

    def _change(self, index: int, responses: int) -> None:
        self._in_flight[index] += responses
        heapq.heappush(self._free, (self._in_flight[index], index))

    def _dispatch(self) -> None:
        while self._waiting and self._free:
            in_flight, index = self._free[0]
            if in_flight != self._in_flight[index]:
                heapq.heappop(self._free)
                continue
            size = len(self._waiting[0].lengths)
            if in_flight and in_flight + size > COSTS.engine.max_in_flight:
                break
            heapq.heappop(self._free)
            self._engines[index].begin(self._waiting.popleft(), self._environment.now)
            self._change(index, size)
            if not self._given[index].triggered:
                self._given[index].succeed()


if __name__ == "__main__":
    main()
