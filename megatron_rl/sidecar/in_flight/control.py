"""Learns from each iteration, and opens the engines for the next one.

Invariants:

- the first iteration, and every one until the trainer has reported its seconds, has all of the bound;
- what is learned comes from the last NUM_KEPT iterations;
- the choice changes times alone: which groups are sampled, and with which seeds, does not depend on it. Where the last
  groups of an iteration are cut or put off, the order of their ends decides which; nothing is chosen there.
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable

from megatron_rl.shared.protocol.slots import divide
from megatron_rl.shared.protocol.wire import Plan
from megatron_rl.sidecar.in_flight.curve import GroupLife, Point, StepCurve, fit_curve, read_points
from megatron_rl.sidecar.in_flight.forecast import Forecast, Opening, SamplingWork, choose

NUM_KEPT = 8

_log = logging.getLogger(__name__)


class Pacer:
    """The responses that engines are given at once."""

    def __init__(self, most: int, max_running: int, is_chosen: bool = True) -> None:
        """Begin with `most` responses on each engine, which is the bound; `max_running` run at a time.

        Unless `is_chosen`, it remains so.
        """
        self.opening = Opening(most)
        self.on_room: Callable[[], None] = lambda: None
        """The callback for a room that has grown."""
        self.room = most
        """The responses that an engine may have in flight, when an engine last asked."""
        self._most = most
        self._max_running = max_running
        self._is_chosen = is_chosen
        self._plan: Plan | None = None
        self._is_paced = False
        self._group_size = 1
        # Groups begun on all engines in this iteration, and delays of the opening that are over.
        self._num_begun = self._num_open = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._lives: list[GroupLife] = []
        self._points: collections.deque[list[Point]] = collections.deque(maxlen=NUM_KEPT)
        self._curve: StepCurve | None = None
        self._choosing: asyncio.Task[None] | None = None

    def count_room(self, num_engines: int, can_wait: bool = False) -> int:
        """Return the most responses that each of the engines that are ready may have in flight now.

        With `can_wait`, a group asks that can wait.
        """
        if not self._is_paced:
            room = self._most
        elif can_wait:
            # Evaluations have no pace. They ask only while no group of the iteration waits.
            room = self.opening.num_in_flight
        else:
            room = self.opening.count_room(self._num_begun // num_engines, self._num_open, self._group_size)
        self.room = min(self._most, room)
        return self.room

    def begun(self) -> None:
        self._num_begun += 1

    def sampled(self, life: GroupLife) -> None:
        if self._is_chosen:
            self._lives.append(life)

    async def begin(self, plan: Plan) -> None:
        if self._choosing is not None:
            await asyncio.wait([self._choosing])
        self._close()
        self._lives = []
        self._plan = plan
        self._num_begun = self._num_open = 0
        self._is_paced, self._group_size = self._can_choose(plan), plan.group_size
        if self._is_paced:
            loop = asyncio.get_running_loop()
            self._timers = [loop.call_later(delay, self._open) for delay in self.opening.delays]
        self.on_room()

    def end(self, train_seconds: float | None) -> None:
        """Learn from an iteration that was trained on, and choose for the next one while weights are published."""
        plan, lives = self._plan, self._lives
        num_groups = sum(not life.is_evaluation for life in lives)
        # A resumed iteration samples the rest of its groups.
        if plan is None or train_seconds is None or not self._can_choose(plan) or num_groups < plan.num_prompts:
            return
        self._plan = None
        self._choosing = asyncio.create_task(self._choose(plan, lives, train_seconds))

    async def close(self) -> None:
        """End a choice that is being made."""
        self._close()
        if self._choosing is not None:
            self._choosing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._choosing

    def _can_choose(self, plan: Plan) -> bool:
        return self._is_chosen and plan.tail == "stop"

    def _open(self) -> None:
        self._num_open += 1
        self.on_room()

    def _close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    async def _choose(self, plan: Plan, lives: list[GroupLife], train_seconds: float) -> None:
        try:
            # In a thread: a large iteration takes some tenths of a second, and the event loop has a publish to serve.
            learned = await asyncio.get_running_loop().run_in_executor(None, self._learn, plan, lives, train_seconds)
        except Exception:
            _log.exception("no number of responses in flight was chosen, and the last one is kept")
            return
        if learned is None:
            return
        self._curve, points, forecast = learned
        self._points.append(points)
        before, self.opening = self.opening, forecast.opening
        if str(before) != str(self.opening):
            _log.info(
                "each engine is given %s from now on, and was given %s: sampling is predicted to take %.3g s, and "
                "training to end after %.3g s",
                self.opening, before, forecast.sampled, forecast.trained,
            )  # fmt: skip

    def _learn(
        self, plan: Plan, lives: list[GroupLife], train_seconds: float
    ) -> tuple[StepCurve, list[Point], Forecast] | None:
        """Return the curve after an iteration, its points, and the forecast with the opening that is chosen."""
        points = read_points(lives, self._max_running, self._curve)
        known = [point for kept in [*self._points, points] for point in kept]
        if not known:
            return None
        curve = fit_curve(known)
        division = divide(plan)
        groups = sorted((life for life in lives if not life.is_evaluation), key=lambda life: life.begun)
        work = SamplingWork(
            lengths=[life.lengths for life in groups],
            max_running=self._max_running,
            num_engines=len({life.engine for life in groups}),
            groups_per_turn=division.groups_per_unit * plan.num_replicas,
            num_updates=plan.num_updates,
            in_prompt_order=plan.order == "prompt",
            train_seconds=train_seconds,
        )
        return curve, points, choose(work, curve, self._most, self.opening)
