"""The time that a scripted engine takes if it samples its responses step by step, as a real one does.

Invariants:

- every running response gets a token in every step, and a step with n of them takes step + n * per_response seconds;
- at most `max_running` run, and the others start in the order in which they came;
- a late timer delays the answer alone: later responses end when they would have ended without it.
"""

import asyncio
import collections
import dataclasses
import heapq
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """The seconds of a decode step."""

    step: float
    """Seconds of a step, whatever runs in it."""
    per_response: float = 0.0
    """Seconds more for each response that runs in it."""
    max_running: int = 64
    """The most responses that run."""


class _Group:
    def __init__(self, num_left: int) -> None:
        self.num_left = num_left
        self.done = asyncio.get_running_loop().create_future()


@dataclasses.dataclass(eq=False)
class _Response:
    group: _Group
    length: int
    started: float | None = None
    """The number of steps before its first token; None while it waits."""
    is_done: bool = False


class Decoding:
    """The responses that an engine samples together."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        # The steps made so far, and the time at which the last of them was counted.
        self._steps = self._since = 0.0
        # A heap: the step after which each response ends, a number that tells equal ones apart, the response.
        self._running: list[tuple[float, int, _Response]] = []
        self._waiting: collections.deque[_Response] = collections.deque()
        self._num_started = 0
        self._timer: asyncio.TimerHandle | None = None

    async def sample(self, lengths: Sequence[int], cut: asyncio.Event | None = None) -> list[int]:
        """Sample responses with these numbers of tokens; return the numbers sampled, fewer if `cut` is set before.

        Cancelling takes the responses out of the batch.
        """
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        group = _Group(len(lengths))
        responses = [_Response(group, length) for length in lengths]
        self._waiting.extend(responses)
        self._start()
        waiting: set[asyncio.Future] = {group.done}
        if cut is not None:
            waiting.add(asyncio.ensure_future(cut.wait()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
            if group.num_left:
                self._advance(loop.time())
                self._drop(group)
        return [self._count(response) for response in responses]

    def _count(self, response: _Response) -> int:
        if response.is_done or response.started is None:
            return response.length if response.is_done else 0
        return min(response.length - 1, int(self._steps - response.started))

    def _advance(self, now: float) -> None:
        """Make the steps until `now`, response by response."""
        while self._running:
            end = self._find_end()
            if end > now:
                self._steps += (now - self._since) / self._step_seconds
                break
            self._steps, _, response = heapq.heappop(self._running)
            self._since = end
            response.is_done = True
            response.group.num_left -= 1
            if not response.group.num_left and not response.group.done.done():
                response.group.done.set_result(None)
            self._fill()
        self._since = now

    @property
    def _step_seconds(self) -> float:
        return self._costs.step + len(self._running) * self._costs.per_response

    def _find_end(self) -> float:
        """Return the time at which the next response ends."""
        return self._since + (self._running[0][0] - self._steps) * self._step_seconds

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._costs.max_running:
            response = self._waiting.popleft()
            response.started = self._steps
            self._num_started += 1
            heapq.heappush(self._running, (self._steps + response.length, self._num_started, response))

    def _start(self) -> None:
        """Start what fits, and set the timer for the next end."""
        self._fill()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            self._timer = asyncio.get_running_loop().call_at(self._find_end(), self._end)

    def _end(self) -> None:
        # A timer may fire a little early, by the resolution of the clock.
        assert self._timer is not None
        self._advance(max(asyncio.get_running_loop().time(), self._timer.when()))
        self._start()

    def _drop(self, group: _Group) -> None:
        self._running = [one for one in self._running if one[2].group is not group]
        heapq.heapify(self._running)
        self._waiting = collections.deque(one for one in self._waiting if one.group is not group)
        self._start()
