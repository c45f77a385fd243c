"""Simulated engines. Time is computed in closed form from one change of the batch to the next, not token by token.

Invariants:

- an engine works while it has a response to sample, and only then;
- between two changes of its batch every running response gets as many tokens as any other;
- nothing finishes before it was begun, and every group that is begun finishes once.
"""

import dataclasses
import heapq
import math
from collections import deque
from typing import Protocol

import numpy as np

from megatron_rl.analysis.plan.costs import BatchingCosts, EngineCosts, ScriptedCosts


@dataclasses.dataclass(eq=False)
class SimulatedGroup:
    """A group of an iteration, and the times of its sampling."""

    index: int
    """Position among the iteration's groups."""
    iteration: int
    prompt: int
    lengths: list[int]
    begun: float = math.nan
    """The time at which an engine was given the group."""
    sampled: float = math.nan
    finished: float = math.nan
    """The time at which it also had its rewards."""
    cached: int = 0
    """The first tokens of the prompt that the engine has in its cache."""


class SimulatedEngine(Protocol):
    """An engine as the pool uses it."""

    @property
    def busy(self) -> float:
        """Return the seconds for which it has sampled, until it last changed or was settled."""
        ...

    num_events: int

    def begin(self, group: SimulatedGroup, now: float) -> None:
        """Take a group."""

    def peek(self) -> float:
        """Return when the next group will have been sampled if nothing is begun before; infinity if it has none."""
        ...

    def take(self) -> SimulatedGroup:
        """Return the group that `peek` tells the time of, at that time."""
        ...

    def pause(self, now: float, seconds: float) -> None:
        """Sample nothing for `seconds` from `now` on."""

    def settle(self, now: float) -> None:
        """Advance to `now`, before which no group ends."""


def build_engine(costs: EngineCosts, generator: np.random.Generator) -> SimulatedEngine:
    """Build an engine of the kind that the costs describe."""
    if isinstance(costs, ScriptedCosts):
        return SimulatedScripted(costs, generator)
    return SimulatedBatching(costs)


@dataclasses.dataclass
class _BatchState:
    """The state of a batching engine at a time."""

    now: float = 0.0
    stalled: float = 0.0
    """Seconds that pass before the next token: prefill, or a pause."""
    paused: float = 0.0
    """The part of `stalled` that is a pause."""
    steps: float = 0.0
    """Tokens of a response that had always been running."""
    context: float = 0.0
    """Tokens that all running responses see together."""
    busy: float = 0.0
    running: list[tuple[float, int, int]] = dataclasses.field(default_factory=list)
    """A heap of running responses: the number of steps at which each ends, its group's number, its length."""
    waiting: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    """Responses that wait to be begun: the number of the group, and the position in it."""
    left: dict[int, int] = dataclasses.field(default_factory=dict)
    """The number of unfinished responses, by the group's number."""

    def copy(self) -> "_BatchState":
        return _BatchState(
            self.now, self.stalled, self.paused, self.steps, self.context, self.busy,
            self.running.copy(), self.waiting.copy(), self.left.copy(),
        )  # fmt: skip


class SimulatedBatching:
    """An engine that batches continuously; satisfies `SimulatedEngine`.

    Its state is computed ahead, up to the end of the next group. If something happens before that, the state is
    computed again from where it was.
    """

    def __init__(self, costs: BatchingCosts) -> None:
        self._costs = costs
        self._groups: dict[int, SimulatedGroup] = {}
        self._num_begun = 0
        self._state = self._ahead = _BatchState()
        self._next: int | None = None
        self._is_computed = True
        self.num_events = 0

    @property
    def busy(self) -> float:
        return self._state.busy

    def begin(self, group: SimulatedGroup, now: float) -> None:
        self.settle(now)
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._groups[number] = group
        group.begun = now
        state = self._state
        state.left[number] = len(group.lengths)
        state.waiting.extend((number, place) for place in range(len(group.lengths)))

    def peek(self) -> float:
        if not self._is_computed:
            self._ahead = self._state.copy()
            self._next = self._run(self._ahead, math.inf)
            self._is_computed = True
        return math.inf if self._next is None else self._ahead.now

    def take(self) -> SimulatedGroup:
        self.peek()
        assert self._next is not None, "no group is at work"
        self._state, number = self._ahead, self._next
        self._is_computed = False
        return self._groups.pop(number)

    def pause(self, now: float, seconds: float) -> None:
        self.settle(now)
        self._state.stalled += seconds
        self._state.paused += seconds

    def settle(self, now: float) -> None:
        self._run(self._state, now)
        self._state.now = now
        self._is_computed = False

    def _run(self, state: _BatchState, until: float) -> int | None:
        """Advance until a group ends, and return its number; or until the time `until`, or until the engine is idle."""
        costs, running = self._costs, state.running
        while True:
            # Responses that end with the same step as the last one end before anything else is begun.
            is_due = bool(running) and running[0][0] <= state.steps
            if state.waiting and len(running) < costs.max_running and not is_due:
                self._admit(state)
            if not running:
                self._wait_out(state, until)
                return None
            if state.stalled and not is_due and not self._pass_stall(state, until):
                return None
            self.num_events += 1
            number = len(running)
            steps = running[0][0] - state.steps
            rate = costs.step + number * costs.per_sequence + state.context * costs.per_context
            growth = number * costs.per_context / 2
            seconds = steps * (rate + growth * steps)
            is_last = state.left[running[0][1]] == 1
            if state.now + seconds > until or (is_last and not math.isinf(until)):
                # Only `take` ends a group. By rounding, its end may lie a little before `until`.
                self._pass_steps(state, until - state.now, rate, growth)
                return None
            state.now += seconds
            state.busy += seconds
            end, group, length = heapq.heappop(running)
            state.steps = end
            state.context += number * steps - length - self._groups[group].prompt
            left = state.left[group] - 1
            if not left:
                del state.left[group]
                return group
            state.left[group] = left

    def _admit(self, state: _BatchState) -> None:
        costs = self._costs
        while state.waiting and len(state.running) < costs.max_running:
            number, place = state.waiting.popleft()
            group = self._groups[number]
            if place == 0:
                state.stalled += costs.per_prompt + (group.prompt - group.cached) * costs.per_prompt_token
            length = group.lengths[place]
            state.context += group.prompt
            heapq.heappush(state.running, (state.steps + length, number, length))

    @staticmethod
    def _wait_out(state: _BatchState, until: float) -> None:
        """Let time pass until `until` with nothing to sample; a pause ends within this time, or continues after it."""
        if state.stalled and not math.isinf(until):
            state.stalled = state.paused = max(0.0, state.stalled - (until - state.now))

    @staticmethod
    def _pass_stall(state: _BatchState, until: float) -> bool:
        """Let the stall pass, at most until `until`; return True if it is over."""
        seconds = min(state.stalled, max(0.0, until - state.now))
        state.now += seconds
        of_pause = min(state.paused, seconds)
        state.busy += seconds - of_pause
        is_over = seconds == state.stalled
        state.paused -= of_pause
        state.stalled = 0.0 if is_over else state.stalled - seconds
        return is_over

    @staticmethod
    def _pass_steps(state: _BatchState, seconds: float, rate: float, growth: float) -> None:
        """Let `seconds` pass, within which no response ends."""
        if seconds <= 0:
            return
        steps = seconds / rate if not growth else (math.sqrt(rate**2 + 4 * growth * seconds) - rate) / (2 * growth)
        steps = min(steps, state.running[0][0] - state.steps)
        state.now += seconds
        state.busy += seconds
        state.steps += steps
        state.context += len(state.running) * steps


class SimulatedScripted:
    """A simulation of `sidecar/engines/scripted.py`; satisfies `SimulatedEngine`."""

    def __init__(self, costs: ScriptedCosts, generator: np.random.Generator) -> None:
        self._costs = costs
        self._generator = generator
        self._ends: list[tuple[float, int, SimulatedGroup]] = []
        self._since = 0.0
        self._num_begun = 0
        self._busy = 0.0
        self.num_events = 0

    @property
    def busy(self) -> float:
        return self._busy

    def begin(self, group: SimulatedGroup, now: float) -> None:
        self.settle(now)
        group.begun = now
        least, most = self._costs.delay
        seconds = self._generator.uniform(least, most) if most > least else least
        if self._costs.tokens_per_second:
            seconds += sum(group.lengths) * (len(self._ends) + 1) / self._costs.tokens_per_second
        self._num_begun += 1
        self.num_events += 1
        heapq.heappush(self._ends, (now + seconds, self._num_begun, group))

    def peek(self) -> float:
        return self._ends[0][0] if self._ends else math.inf

    def take(self) -> SimulatedGroup:
        self.settle(self._ends[0][0])
        return heapq.heappop(self._ends)[2]

    def pause(self, now: float, seconds: float) -> None:
        """Do nothing: groups end at the times that were fixed when they were begun."""

    def settle(self, now: float) -> None:
        if self._ends:
            self._busy += now - self._since
        self._since = now
