"""The simulated engines together, which share the groups; a group is finished when it has its rewards.

Invariants, as in `sidecar/engines/pool.py`:

- the group that has waited longest goes first, to the engine with the fewest responses in flight if it has room;
- an engine has more than its bound in flight only for one group that is larger;
- it has the room of an opening, by the groups that all engines have begun and the delays that are over;
- a turn of a conversation goes before groups that have not begun, once its environment has answered;
- events happen in the order of their times.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence

from megatron_rl.analysis.plan.costs import Talk
from megatron_rl.analysis.plan.engines import SimulatedEngine, SimulatedGroup
from megatron_rl.analysis.plan.talks import SimulatedTurn, open_talks
from megatron_rl.sidecar.in_flight.forecast import Opening


class Pool:
    """The engines, and the workers that compute rewards."""

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        max_in_flight: int,
        reward: float,
        reward_workers: int,
        talk: Talk | None = None,
    ) -> None:
        """Make a pool; with `talk`, responses are such conversations."""
        self.engines = engines
        self.now = 0.0
        self.finished: deque[SimulatedGroup] = deque()
        """Groups with their rewards that are still to be taken, in the order in which they were finished."""
        self.last_sampled = [0.0] * len(engines)
        """The time at which each engine had sampled its last group."""
        self.num_events = 0
        self._max_in_flight = max_in_flight
        self._reward = reward
        self._workers = [0.0] * reward_workers
        self._in_flight = [0] * len(engines)
        self._waiting: deque[SimulatedGroup] = deque()
        self._opening: Opening | None = None
        self._submitted = 0.0
        self._delays: deque[float] = deque()
        self._num_begun = 0
        self._talk = talk or Talk()
        self._num_talks = 0
        # Turns that wait for their environment's answer, by the time at which it comes.
        self._answers: list[tuple[float, int, SimulatedTurn]] = []
        # The conversations of a group that are not over, by the group's identity.
        self._left: dict[int, int] = {}
        # Heaps, which also hold outdated entries: by the next group's time, and by the responses in flight.
        self._next: list[tuple[float, int]] = []
        self._free = [(0, index) for index in range(len(engines))]

    def submit(self, groups: Iterable[SimulatedGroup], now: float, opening: Opening | None = None) -> None:
        """Give the engines groups to sample, with the room of this opening, or else all of it."""
        self.advance(now)
        self.now = self._submitted = max(self.now, now)
        self._opening = opening
        self._delays = deque(() if opening is None else opening.delays)
        self._num_begun = 0
        for group in groups:
            self._waiting.extend(self._open(group))
        for index in self._dispatch():
            self._expect(index)

    def pause(self, now: float, seconds: float) -> None:
        """Pause all engines for `seconds`."""
        self.advance(now)
        self.now = max(self.now, now)
        for index, engine in enumerate(self.engines):
            engine.pause(now, seconds)
            self._expect(index)

    def advance(self, until: float) -> None:
        """Advance the simulation to the time `until`."""
        while self._peek() <= until:
            self._step()

    def finish(self, count: int) -> None:
        """Advance the simulation until `count` finished groups have not been taken."""
        while len(self.finished) < count:
            assert self._peek() < math.inf, f"fewer than {count} groups were submitted"
            self._step()

    def take(self, count: int, iteration: int | None = None) -> list[SimulatedGroup]:
        """Advance until `count` groups of `iteration`, or of any, are finished; take them, the earliest first."""
        while True:
            found = [group for group in self.finished if iteration is None or group.iteration == iteration][:count]
            if len(found) == count:
                break
            self.finish(len(self.finished) + count - len(found))
        taken = {id(group) for group in found}
        self.finished = deque(group for group in self.finished if id(group) not in taken)
        return found

    def read_busy(self, now: float) -> float:
        """Return the seconds for which the engines have sampled until now, summed over engines."""
        self.advance(now)
        self.now = max(self.now, now)
        for index, engine in enumerate(self.engines):
            engine.settle(now)
            self._expect(index)
        return sum(engine.busy for engine in self.engines)

    def _peek(self) -> float:
        answered = self._answers[0][0] if self._answers else math.inf
        return min(self._peek_group(), answered, self._submitted + self._delays[0] if self._delays else math.inf)

    def _peek_group(self) -> float:
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
        """Advance to the next group that an engine has sampled, and finish it; or to the next answer or delay's end."""
        self.num_events += 1
        if self._answers and self._answers[0][0] <= self._peek():
            self._hear()
            return
        if self._delays and self._submitted + self._delays[0] <= self._peek_group():
            self.now = self._submitted + self._delays.popleft()
            for index in self._dispatch():
                self._expect(index)
            return
        time, index = heapq.heappop(self._next)
        group = self.engines[index].take()
        self.now = group.sampled = self.last_sampled[index] = time
        self._in_flight[index] -= len(group.lengths)
        heapq.heappush(self._free, (self._in_flight[index], index))
        if isinstance(group, SimulatedTurn):
            heapq.heappush(self._answers, (time + self._talk.seconds, self.num_events, group))
        else:
            self._finish(group, time)
        changed = self._dispatch()
        for changed_index in changed | {index}:
            self._expect(changed_index)

    def _open(self, group: SimulatedGroup) -> Iterable[SimulatedGroup]:
        if not self._talk.is_needed:
            return [group]
        turns = list(open_talks(group, self._talk, self._num_talks))
        self._num_talks += len(turns)
        self._left[id(group)] = len(turns)
        return turns

    def _hear(self) -> None:
        """Take the next answer of an environment: the conversation continues, or is over."""
        self.now, _, turn = heapq.heappop(self._answers)
        whole = turn.whole
        assert whole is not None
        if math.isnan(whole.begun):
            whole.begun = turn.begun
        if turn.rest:
            self._waiting.appendleft(turn.follow())
        else:
            self._left[id(whole)] -= 1
            if not self._left[id(whole)]:
                del self._left[id(whole)]
                whole.sampled = self.now
                self._finish(whole, self.now)
        for index in self._dispatch():
            self._expect(index)

    def _finish(self, group: SimulatedGroup, time: float) -> None:
        begun = heapq.heappop(self._workers)
        group.finished = max(begun, time) + self._reward
        heapq.heappush(self._workers, group.finished)
        self.finished.append(group)

    def _count_room(self, size: int) -> int:
        if self._opening is None:
            return self._max_in_flight
        # Delays are counted from what is left of them: sums of seconds would be rounded.
        num_open = len(self._opening.delays) - len(self._delays)
        room = self._opening.count_room(self._num_begun // len(self.engines), num_open, size)
        return min(self._max_in_flight, room)

    def _dispatch(self) -> set[int]:
        """Begin the groups for which engines have room; return the engines that were given some."""
        changed = set()
        while self._waiting and self._free:
            in_flight, index = self._free[0]
            if in_flight != self._in_flight[index]:
                heapq.heappop(self._free)
                continue
            size = len(self._waiting[0].lengths)
            if in_flight and in_flight + size > self._count_room(size):
                # The emptiest engine has no room either.
                break
            heapq.heappop(self._free)
            self.engines[index].begin(self._waiting.popleft(), self.now)
            self._in_flight[index] += size
            self._num_begun += 1
            heapq.heappush(self._free, (self._in_flight[index], index))
            changed.add(index)
        return changed
