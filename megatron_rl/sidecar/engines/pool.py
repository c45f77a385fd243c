"""The choice of the engine that samples a group.

Invariants:

- a group goes to the READY engine with the fewest responses in flight, and never exceeds an engine's bound, nor the
  room that the engines have for now (`sidecar/in_flight`), unless the engine is idle;
- groups that can wait take no room from the others: only the bound counts both;
- the group that has waited longest goes first, but a group that can wait goes only if no other waits;
- a turn of a conversation goes before groups that have not begun, to the engine of its last turn if that has room;
- if its engine is lost or refuses, a group is tried again at once, on any engine and with the same seed, a bounded
  number of times;
- an engine's room is freed however a request ends, also if it is cancelled.
"""

import asyncio
import collections
import logging
from collections.abc import Callable, Iterable

from megatron_rl.observe.trace import GROUPS, Recorder
from megatron_rl.shared.protocol.wire import Response
from megatron_rl.sidecar import attempts
from megatron_rl.sidecar.engines import Engine, EngineLost, EngineRefused, EngineState, GroupRequest
from megatron_rl.sidecar.in_flight.control import Pacer
from megatron_rl.sidecar.in_flight.curve import GroupLife

_log = logging.getLogger(__name__)


_Queue = collections.deque[tuple[int, str | None, asyncio.Future[Engine]]]


class EnginePool:
    """The distribution of groups over engines."""

    def __init__(
        self,
        engines: Callable[[], Iterable[Engine]],
        max_responses: int,
        on_lost: Callable[[Engine, EngineLost], None],
        none_left: Callable[[], str | None],
        recorder: Recorder | None = None,
    ) -> None:
        """Make a pool.

        `max_responses` bounds each engine; a larger group goes to an idle engine. `none_left` returns why no engine
        will be ready again, or None.
        """
        self.num_retried = 0
        self.max_responses = max_responses
        self.pacing: Pacer | None = None
        """Decides how much of the bound may be used for now; all of it without one."""
        self._engines = engines
        self._on_lost = on_lost
        self._none_left = none_left
        self._recorder = recorder or Recorder(most=0)
        self._in_flight: collections.Counter[str] = collections.Counter()
        # Those of groups that can wait.
        self._patient: collections.Counter[str] = collections.Counter()
        # In the order in which they go: turns and groups, then turns and groups that can wait.
        self._waiting: tuple[_Queue, ...] = tuple(collections.deque() for _ in range(4))

    async def generate(self, request: GroupRequest) -> list[Response]:
        since = self._recorder.now() if request.since is None else request.since
        for attempt in range(1, attempts.TURN + 1):
            engine = await self._take(request.group_size, request.can_wait, request.after)
            taken, responses = self._recorder.now(), None
            sampling = self._begin(request, engine.name)
            try:
                responses = await engine.generate(request)
                sampling(responses)
                return responses
            except (EngineLost, EngineRefused) as error:
                _log.warning("attempt %d of request %s: %s", attempt, request.request_id, error)
                if isinstance(error, EngineLost):
                    self._on_lost(engine, error)
                reason = str(error)
                self.num_retried += 1
            finally:
                since = self._note(request, engine.name, since, taken, responses)
                self._give_back(engine, request.group_size, request.can_wait)
        raise EngineLost(f"{reason}; request {request.request_id} was tried {attempts.TURN} times")

    def _note(
        self, request: GroupRequest, engine: str, since: float, taken: float, responses: list[Response] | None
    ) -> float:
        """Record how long a group waited and was sampled; return the time from which it may wait again."""
        recorder, now = self._recorder, self._recorder.now()
        details: dict[str, bool] = {"evaluation": True} if request.can_wait else {}
        recorder.add(recorder.kind(GROUPS, "queue", **details), since, taken, request.prompt)
        num_tokens = None
        if responses is None:
            details["failed"] = True
        else:
            num_tokens = sum(len(response.tokens) // 4 for response in responses)
        kind = recorder.kind(GROUPS, "generate", engine=engine, size=request.group_size, **details)
        recorder.add(kind, taken, now, request.prompt, num_tokens)
        return now

    def _begin(self, request: GroupRequest, engine: str) -> Callable[[list[Response]], None]:
        """Note that a group begins; return the function that notes its end."""
        pacing = self.pacing
        if pacing is None:
            return lambda responses: None
        clock = asyncio.get_running_loop().time
        begun, num_before = clock(), self._in_flight[engine] - request.group_size

        def end(responses: list[Response]) -> None:
            lengths = tuple(len(response.tokens) // 4 for response in responses)
            pacing.sampled(GroupLife(engine, begun, clock(), lengths, num_before, request.can_wait))

        return end

    def in_flight(self, name: str) -> int:
        return self._in_flight[name]

    @property
    def num_waiting(self) -> int:
        """The number of groups that wait for an engine."""
        return sum(map(len, self._waiting))

    def engines_changed(self) -> None:
        """Serve waiting groups if an engine has become ready; fail them if no engine ever will."""
        while waiting := next(((place, queue) for place, queue in enumerate(self._waiting) if queue), None):
            place, queue = waiting
            can_wait = place >= 2
            size, after, future = queue[0]
            if future.done():
                queue.popleft()
            elif engine := self._choose(size, can_wait, after):
                queue.popleft()
                self._in_flight[engine.name] += size
                self._patient[engine.name] += size * can_wait
                if self.pacing is not None and not can_wait:
                    self.pacing.begun()
                future.set_result(engine)
            elif reason := self._none_left():
                queue.popleft()
                future.set_exception(EngineLost(reason))
            else:
                return

    async def _take(self, size: int, can_wait: bool, after: str | None) -> Engine:
        future: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        # Conversations that have begun end before others begin.
        self._waiting[2 * can_wait + (after is None)].append((size, after, future))
        self.engines_changed()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self._give_back(future.result(), size, can_wait)
            raise

    def _give_back(self, engine: Engine, size: int, can_wait: bool) -> None:
        self._in_flight[engine.name] -= size
        self._patient[engine.name] -= size * can_wait
        self.engines_changed()

    def _choose(self, size: int, can_wait: bool, after: str | None = None) -> Engine | None:
        ready = [engine for engine in self._engines() if engine.state is EngineState.READY]
        room = self.max_responses
        if self.pacing is not None and ready:
            room = self.pacing.count_room(len(ready), can_wait)

        def has_room(name: str) -> bool:
            num_in_flight = self._in_flight[name]
            num_counted = num_in_flight if can_wait else num_in_flight - self._patient[name]
            is_within = num_counted + size <= room and num_in_flight + size <= self.max_responses
            return is_within or not num_in_flight

        free = [engine for engine in ready if has_room(engine.name)]
        return min(free, key=lambda engine: (engine.name != after, self._in_flight[engine.name]), default=None)
