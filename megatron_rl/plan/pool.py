"""The engines together: which one samples which group, and when each group is finished.

Invariants, as in `sidecar/engines/pool.py`:

- a group goes to the engine with the fewest responses in flight that has room for it, the longest waiting first;
- an engine has more than its bound in flight only for one group that is larger;
- events happen in the order of their times.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence

from megatron_rl.plan.engines import SimulatedEngine, SimulatedGroup


class Pool:
    """Engines, and the workers that give rewards."""

    def __init__(
        self, engines: Sequence[SimulatedEngine], max_in_flight: int, reward: float, reward_workers: int
    ) -> None:
        self.engines = engines
        self.now = 0.0
        self.finished: deque[SimulatedGroup] = deque()
        """Groups with their rewards that nobody has taken, in the order in which they were finished."""
        self.last_sampled = [0.0] * len(engines)
        """When each engine had sampled its last group."""
        self.num_events = 0
        self._max_in_flight = max_in_flight
        self._reward = reward
        self._workers = [0.0] * reward_workers
        self._in_flight = [0] * len(engines)
        self._waiting: deque[SimulatedGroup] = deque()
        # Heaps, with entries that are out of date: by the next group's time, and by what is in flight.
        self._next: list[tuple[float, int]] = []
        self._free = [(0, index) for index in range(len(engines))]

    def submit(self, groups: Iterable[SimulatedGroup], now: float) -> None:
        """Give the engines groups to sample."""
        self.advance(now)
        self.now = max(self.now, now)
        self._waiting.extend(groups)
        for index in self._dispatch():
            self._expect(index)

    def pause(self, now: float, seconds: float) -> None:
        """Have all engines sample nothing for so long."""
        self.advance(now)
        self.now = max(self.now, now)
        for index, engine in enumerate(self.engines):
            engine.pause(now, seconds)
            self._expect(index)

    def advance(self, until: float) -> None:
        """Let happen what happens until then."""
        while self._peek() <= until:
            self._step()

    def finish(self, count: int) -> None:
        """Let happen what must until so many finished groups are there."""
        while len(self.finished) < count:
            assert self._peek() < math.inf, "there are not so many groups"
            self._step()

    def take(self, count: int, iteration: int | None = None) -> list[SimulatedGroup]:
        """Take so many finished groups, of that iteration or of any, the earliest first, once they are there."""
        while True:
            found = [group for group in self.finished if iteration is None or group.iteration == iteration][:count]
            if len(found) == count:
                break
            self.finish(len(self.finished) + count - len(found))
        taken = {id(group) for group in found}
        self.finished = deque(group for group in self.finished if id(group) not in taken)
        return found

    def read_busy(self, now: float) -> float:
        """Return for how long the engines have sampled until now, all together."""
        self.advance(now)
        self.now = max(self.now, now)
        for index, engine in enumerate(self.engines):
            engine.settle(now)
            self._expect(index)
        return sum(engine.busy for engine in self.engines)

    def _peek(self) -> float:
        while self._next:
            time, index = self._next[0]
            if time == self.engines[index].peek():
                return time
            heapq.heappop(self._next)
        return math.inf

    def _expect(self, index: int) -> None:
        time = self.engines[index].peek()
        if time < math.inf:
            heapq.heappush(self._next, (time, index))

    def _step(self) -> None:
        """Take the next group that is sampled."""
        self.num_events += 1
        time, index = heapq.heappop(self._next)
        group = self.engines[index].take()
        self.now = group.sampled = self.last_sampled[index] = time
        self._in_flight[index] -= len(group.lengths)
        heapq.heappush(self._free, (self._in_flight[index], index))
        begun = heapq.heappop(self._workers)
        group.finished = max(begun, time) + self._reward
        heapq.heappush(self._workers, group.finished)
        self.finished.append(group)
        changed = self._dispatch()
        for changed_index in changed | {index}:
            self._expect(changed_index)

    def _dispatch(self) -> set[int]:
        """Begin what can be begun; return the engines that were given something."""
        changed = set()
        while self._waiting and self._free:
            in_flight, index = self._free[0]
            if in_flight != self._in_flight[index]:
                heapq.heappop(self._free)
                continue
            size = len(self._waiting[0].lengths)
            if in_flight and in_flight + size > self._max_in_flight:
                # Even the emptiest has no room.
                break
            heapq.heappop(self._free)
            self.engines[index].begin(self._waiting.popleft(), self.now)
            self._in_flight[index] += size
            heapq.heappush(self._free, (self._in_flight[index], index))
            changed.add(index)
        return changed
