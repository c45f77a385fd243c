"""Keeps the engines alive and at one version.

Invariants:

- an engine takes groups only in the state READY. A READY engine answers, holds the current version, and has sampled a
  token from it;
- a publish brings all engines that are up to a version, or leaves none of them READY;
- an engine that dies is restarted with growing pauses, and brought to the current version from the copy that the
  transport keeps, which is sent to its host if it does not lie there. Without a copy it waits for the next publish;
- an engine that fails too often in a row is given up. When none is left, or none has become READY again in time,
  waiting requests fail with the reason;
- an engine that is not up is being started, by its task or by a publish, or has been given up;
- while engines sleep, because ranks have their devices, none is started: that waits for the next publish.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.observe.trace import Recorder
from megatron_rl.shared.protocol.wire import Drafts, ProbeAnswer, Response, Weights
from megatron_rl.sidecar import attempts, streams
from megatron_rl.sidecar.engines import Engine, EngineLost, EngineState, GroupRequest, NotGiven
from megatron_rl.sidecar.engines.pool import EnginePool
from megatron_rl.sidecar.members import UP, EngineFactory, Member, Members, SupervisedEngine, cancel
from megatron_rl.sidecar.publication import (
    AwaitAnswer,
    NotBegun,
    Proof,
    Published,
    StepDeadlines,
    StepFailed,
    Steps,
    TrainerSilent,
)

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_LEAST_SECONDS_BETWEEN_LOOKS = 0.02
"""A look costs about a millisecond: a thousand engines are looked at each 20 seconds."""


class PublishFailed(MegatronRLError):
    """A version could not be brought to the engines, and none of them samples."""


class WeightsNotProven(PublishFailed):
    """Engines were proved not to hold the version that they report."""

    def __init__(self, text: str, weights: Weights, wrong: dict[str, str]) -> None:
        super().__init__(text)
        self.weights = weights
        self.wrong = wrong


class WrongWorkerCount(PublishFailed):
    """The trainer opened a stream for another number of workers than can receive it, and must count again."""


@dataclasses.dataclass(frozen=True)
class SupervisorConfig:
    """The limits under which engines are watched, fed and restarted."""

    max_responses: int = 128
    """The most responses in flight on one engine: twice those that it samples at a time, so that it never idles."""
    watch_seconds: float = 1.0
    """Seconds between two looks at an engine; more if there are very many engines."""
    first_pause: float = 1.0
    """Seconds before an engine that died is started again; doubled with each death in a row."""
    longest_pause: float = 60.0
    """The most seconds of such a pause."""
    max_failures: int = 5
    """The deaths in a row after which an engine is given up."""
    healthy_seconds: float = 300.0
    """Seconds of life after which an engine's earlier deaths no longer count."""
    takes_turns: bool = False
    """True if engines sleep until the first publish, and again once `sleep` is called, until the next one."""
    lost_seconds: float = 900.0
    """Seconds for which groups wait while no engine is READY."""
    deadlines: StepDeadlines = StepDeadlines()


class Supervisor:
    """All engines of a sidecar, as the rollout service knows them."""

    def __init__(
        self,
        factory: EngineFactory,
        config: SupervisorConfig = SupervisorConfig(),
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._recorder = recorder or Recorder(most=0)
        self._members = Members(factory)
        self._published: Published | None = None
        """The version that engines were last brought to. It is current until another publish begins."""
        self._is_current = False
        self._none_since: float | None = None
        """The time since which no engine takes groups, outside of a publish."""
        self._steps = Steps(config.deadlines, self._recorder)
        self.on_joined: Callable[[Weights, Sequence[Proof]], None] = lambda weights, proofs: None
        """The callback for engines that were brought to the current version after its publish."""
        self._lock = asyncio.Lock()
        self._awake = asyncio.Event()
        self._awake.set()
        self._is_asleep = False
        self._watcher: asyncio.Task[None] | None = None
        list_engines = self._members.list_engines
        self.pool = EnginePool(list_engines, config.max_responses, self._lost, self._none_left, self._recorder)

    async def start(self, num_engines: int) -> None:
        """Start engines, all at the same time; at the first error, end them all."""
        members = [self._members.make() for _ in range(num_engines)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for member in members:
                    tasks.create_task(member.engine.start())
        except BaseExceptionGroup as group:
            await self.close()
            raise group.exceptions[0] from None
        for member in members:
            member.started = time.monotonic()
        if self._config.takes_turns:
            await self.sleep()
        self._watcher = asyncio.create_task(self._watch())

    async def generate(self, request: GroupRequest) -> list[Response]:
        """Return the responses of a group, sampled by any of the engines."""
        return await self.pool.generate(request)

    @property
    def max_in_flight(self) -> int:
        """The most groups worth having in flight; the pool's own bound counts responses."""
        return max(1, len(self._members)) * self._config.max_responses

    async def publish(self, weights: Weights, answer: AwaitAnswer | None = None) -> Published:
        """Bring a version to all engines that are up, or to none.

        `answer` waits for the trainer's log-probs of the probe. Without it engines are compared only with each other.
        """
        async with self._lock:
            # An engine that returns meanwhile, or after a failure, must not load the previous version.
            self._is_current = False
            self._awake.set()
            self._is_asleep = False
            await self._members.forget_leaving()
            try:
                self._published = published = await self._publish(weights, answer)
            except BaseException:
                self._members.withdraw()
                raise
            self._is_current = True
            self._note_up()
            steps = ", ".join(f"{step} {1e3 * seconds:.0f}" for step, seconds in published.seconds.items())
            _log.info("version %d is published; milliseconds of each step: %s", weights.version, steps)
        self.pool.engines_changed()
        return published

    async def sleep(self) -> None:
        """Have all engines give their devices to the ranks, until the next publish; end those that do not."""
        if not self._config.takes_turns:
            raise InputError("these engines keep their devices: start the sidecar with --rollout-colocate sleep")
        async with self._lock:
            if self._is_asleep:
                return
            self._is_current = False
            self._awake.clear()
            # If one fails otherwise than an engine may, the others are waited for too.
            ends = await asyncio.gather(*map(self._sleep, self._members.values()), return_exceptions=True)
            for error in filter(None, ends):
                raise error
            self._is_asleep = True

    async def _sleep(self, member: Member) -> None:
        while member.is_starting:
            # It takes memory, and the next iteration wants it.
            await asyncio.sleep(_POLL_SECONDS)
        if member.engine.state not in UP:
            # It is started with the next publish; what is left of it has memory until it is closed.
            await member.engine.close()
            return
        try:
            async with asyncio.timeout(self._config.deadlines.sleep):
                await member.engine.sleep()
        except (MegatronRLError, TimeoutError) as error:
            await member.engine.close()
            self._revive(member, str(error) or f"engine {member.name} did not fall asleep in time")

    def add(self, count: int = 1) -> list[str]:
        """Start more engines; each joins when it holds the current version, or with the next publish."""
        self._must_keep_devices()
        members = [self._members.make() for _ in range(count)]
        for member in members:
            self._run_for(member, self._bring_up(member))
        return [member.name for member in members]

    async def adopt(self, address: str) -> str:
        """Adopt an engine that was started elsewhere on this host, given the path of its socket."""
        self._must_keep_devices()
        member = self._members.make(address)
        try:
            await member.engine.start()
        except BaseException:
            await self._members.forget(member)
            raise
        self._run_for(member, self._bring_up(member, is_started=True))
        return member.name

    def _must_keep_devices(self) -> None:
        if self._config.takes_turns:
            raise InputError("engines that have devices by turns with ranks are started with the run, and no more join")

    def remove(self, name: str) -> None:
        """Remove an engine with the next publish, when nothing is in flight."""
        self._members.leave(name)

    def names(self) -> list[str]:
        return list(self._members)

    def status(self) -> dict[str, Any]:
        """Return the state of every engine, its step with the seconds so far, and its last error."""
        staying = [member for member in self._members.list_up() if not member.is_leaving]
        return {
            "version": self._published.weights.version if self._published else None,
            "publishing": self._lock.locked(),
            "num_workers": sum(member.engine.num_workers for member in staying),
            "groups_waiting": self.pool.num_waiting,
            "groups_retried": self.pool.num_retried,
            "engines": self._members.status(self._steps.current, self.pool.in_flight),
        }

    async def count_drafts(self) -> Drafts | None:
        """Count the drafts of all engines since the last version ended; None if none of them drafts."""
        counts = await asyncio.gather(*(member.engine.count_drafts() for member in self._members.list_up()))
        found = [count for count in counts if count is not None]
        return sum(found, Drafts()) if found else None

    async def close(self) -> None:
        """End every engine that was started here."""
        await cancel(self._watcher)
        await self._members.forget_all()
        self.pool.engines_changed()

    async def _publish(self, weights: Weights, answer: AwaitAnswer | None) -> Published:
        """Try until an attempt succeeds. An engine that is lost, or refuses twice, is restarted.

        An engine that holds other weights than it reports ends the publish, because its other reports cannot be trusted
        either.
        """
        for attempt in range(1, attempts.PUBLISH + 1):
            members = await self._present(weights)
            engines = [member.engine for member in members]
            if weights.is_streamed:
                self._place(engines, weights)
            try:
                return await self._steps.publish(engines, weights, self._published, answer)
            except TrainerSilent as silence:
                raise PublishFailed(f"version {weights.version} was not published: {silence}") from None
            except StepFailed as failure:
                self._members.withdraw()
                if failure.wrong:
                    text = (
                        f"version {weights.version} was not published: {failure}; nothing was trained with it. Resume "
                        f"from the last checkpoint. If it happens again, report it with the engine's log (logs/ in "
                        f"the run's folder) and the output of `megatron-rl doctor`"
                    )
                    raise WeightsNotProven(text, weights, failure.wrong) from None
                if failure.is_for_nothing:
                    raise PublishFailed(f"version {weights.version} was not published: {failure}") from None
                _log.warning("attempt %d to publish version %d: %s", attempt, weights.version, failure)
                if attempt == attempts.PUBLISH or weights.is_streamed:
                    for name, error in failure.errors.items():
                        self._revive(self._members[name], str(error))
                    is_begun = not weights.is_streamed or not isinstance(failure, NotBegun)
                    if not is_begun and failure.lost == list(failure.errors):
                        raise WrongWorkerCount(f"version {weights.version} lost workers: {failure}") from None
                    # Only the trainer can send a stream again.
                    raise PublishFailed(f"version {weights.version} was not published: {failure}") from None
                failed = list(failure.errors) if attempt > 1 else failure.lost
                await self._restart(await self._find_restartable(failed, failure), failure)
        raise AssertionError("the last attempt returns or raises")

    def _place(self, engines: list[SupervisedEngine], weights: Weights) -> None:
        """Assign each engine its place in the stream that the trainer has opened."""
        counts = [engine.num_workers for engine in engines]
        num_streamed = weights.stream.world_size - 1
        if not engines or sum(counts) != num_streamed:
            raise WrongWorkerCount(
                f"version {weights.version} is streamed to {num_streamed} workers, and the engines that answer have "
                f"{sum(counts)}"
            )
        for engine, place in zip(engines, streams.assign_places(counts), strict=True):
            engine.stream_place = place

    async def _find_restartable(self, names: Sequence[str], failure: StepFailed) -> list[Member]:
        """Return the engines that are started again at once.

        An engine whose host does not answer is started when the host is back. An engine whose host was not given the
        version keeps its processes and waits for the next one.
        """
        found = []
        for name in names:
            member, error = self._members[name], failure.errors[name]
            if isinstance(error, NotGiven):
                continue
            if await member.engine.host.answers():
                found.append(member)
            else:
                self._revive(member, str(error))
        return found

    async def _present(self, weights: Weights) -> list[Member]:
        """Return the engines that are up and are given the version; while engines are coming up, wait for one."""
        seconds = min(self._config.lost_seconds, weights.deadline_seconds or math.inf)
        deadline = time.monotonic() + seconds
        while True:
            up = self._members.list_up()
            given = await asyncio.gather(*(member.engine.host.is_given(weights) for member in up))
            for member, is_given in zip(up, given, strict=True):
                if not is_given and member.engine.state is not EngineState.WAITING:
                    # It holds an older version.
                    member.engine.state = EngineState.DIRTY
            if members := [member for member, is_given in zip(up, given, strict=True) if is_given]:
                return members
            is_late = time.monotonic() > deadline
            if is_late or not any(map(_is_coming, self._members.values())):
                if up and weights.is_streamed:
                    # Their hosts answer again, or are found to be lost.
                    return []
                if up:
                    raise PublishFailed(f"version {weights.version} reached no host that has engines: publish it again")
                which = f"no engine came up within {seconds:g} s" if is_late else "no engine is left"
                raise PublishFailed(f"{which}: {self._members.describe_errors() or 'none was started'}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _restart(self, members: list[Member], failure: StepFailed) -> None:
        """Start engines again at once, within a publish."""

        async def one(member: Member) -> None:
            try:
                # A group in flight may have reported the loss before the publish did.
                await cancel(member.task)
                await self._members.replace(member, str(failure.errors[member.name]))
                await member.engine.start()
                member.started = time.monotonic()
            except BaseException as error:
                self._revive(member, str(error) or str(failure))
                raise

        results = await asyncio.gather(*(one(member) for member in members), return_exceptions=True)
        for member, error in zip(members, results, strict=True):
            if isinstance(error, Exception):
                raise PublishFailed(
                    f"engine {member.name} failed ({failure.errors[member.name]}) and could not be restarted: {error}"
                )

    async def _watch(self) -> None:
        """Look at one engine after the other, evenly spread."""
        while True:
            for member in list(self._members.values()):
                if member.engine.state in UP and (member.check is None or member.check.done()):
                    # A slow answer must not delay the checks of the others.
                    member.check = asyncio.create_task(self._check(member, member.engine))
                if self._count_seconds_without() > self._config.lost_seconds:
                    self.pool.engines_changed()
                pause = self._config.watch_seconds / max(1, len(self._members))
                await asyncio.sleep(max(pause, _LEAST_SECONDS_BETWEEN_LOOKS))
            if not self._members:
                await asyncio.sleep(self._config.watch_seconds)

    async def _check(self, member: Member, engine: SupervisedEngine) -> None:
        fault = await engine.find_fault()
        # In a publish every step has its own deadline.
        if fault and member.engine is engine and engine.state in UP and not self._lock.locked():
            self._revive(member, f"engine {member.name}: {fault}\n{engine.last_words()}")

    def _lost(self, engine: Engine, error: EngineLost) -> None:
        member = self._members.get(engine.name)
        if member is not None and member.engine is engine:
            self._revive(member, str(error))

    def _revive(self, member: Member, reason: str) -> None:
        """Start an engine again in the background."""
        is_idle = member.task is None or member.task.done()
        if is_idle or member.engine.state is not EngineState.DEAD:
            # Requests that end because their engine is closed do not know the reason.
            member.error = reason
        member.engine.state = EngineState.DEAD
        if member.down_since is None:
            member.down_since = self._recorder.now()
        if is_idle:
            _log.warning("%s", reason)
            self._run_for(member, self._bring_back(member))

    async def _bring_back(self, member: Member) -> None:
        if time.monotonic() - member.started > self._config.healthy_seconds:
            member.num_failures = 0
        while member.num_failures < self._config.max_failures:
            pause = self._config.first_pause * 2**member.num_failures
            # The loss of a host is not a failure of its engines.
            if await member.engine.host.answers():
                member.num_failures += 1
            await asyncio.sleep(min(pause, self._config.longest_pause))
            await member.engine.host.until_back()
            if await self._try_bring_up(member, is_again=True):
                return
        member.is_given_up = True
        await member.engine.close()

    async def _bring_up(self, member: Member, is_started: bool = False) -> None:
        if not await self._try_bring_up(member, is_started):
            await self._bring_back(member)

    async def _try_bring_up(self, member: Member, is_started: bool = False, is_again: bool = False) -> bool:
        try:
            while not self._awake.is_set():
                await self._awake.wait()
            member.is_starting = True
            try:
                if is_again:
                    await self._members.replace(member, member.error)
                if not is_started:
                    await member.engine.start()
            finally:
                member.is_starting = False
            member.started = time.monotonic()
            await self._catch_up(member)
        except Exception as error:
            _log.warning("engine %s: %s", member.name, error)
            member.error = str(error)
            member.engine.state = EngineState.DEAD
            return False
        return True

    async def _catch_up(self, member: Member) -> None:
        """Bring an engine to the current version from its copy, if one exists.

        A copy may take long to arrive, and a publish must not wait for it. If one takes place meanwhile, the engine
        takes part in it, or needs a copy of the new version.
        """
        while True:
            wanted = self._published if self._is_current else None
            has_copy = wanted is not None and await member.engine.host.has_copy(wanted.weights)
            async with self._lock:
                _must_be_up(member)
                published = self._published
                if member.engine.state is EngineState.READY or published is None or not self._is_current:
                    return
                if published is wanted:
                    await self._load_copy(member, published, has_copy)
                    return

    async def _load_copy(self, member: Member, published: Published, has_copy: bool) -> None:
        """Bring an engine to the current version, while no publish runs."""
        if not has_copy:
            is_streamed = published.weights.is_streamed
            reason = "a stream leaves no copy" if is_streamed else "its host was not given it, and no host has all"
            member.error = (
                f"engine {member.name} waits for the next publish: version {published.weights.version} cannot be "
                f"sent to it, because {reason}"
            )
            _log.info("%s", member.error)
            return
        answer = None if published.answer is None else _given(published.answer)
        try:
            joined = await self._steps.publish([member.engine], published.weights, published, answer)
        except StepFailed as failure:
            if not isinstance(failure.errors[member.name], NotGiven):
                raise
            # The trainer has begun the next version, which takes this one's place.
            member.engine.state, member.error = EngineState.DIRTY, str(failure)
            return
        self.on_joined(joined.weights, joined.proofs)
        self._note_up()

    def _note_up(self) -> None:
        """Record the downtime of engines that take groups again."""
        for name, member in self._members.items():
            if member.down_since is not None and member.engine.state is EngineState.READY:
                self._recorder.add(self._recorder.kind(name, "down"), member.down_since, self._recorder.now())
                member.down_since = None

    def _none_left(self) -> str | None:
        """Say why no engine will be READY before the next publish; None while one is or may become READY."""
        seconds = self._count_seconds_without()
        if seconds > self._config.lost_seconds:
            errors = self._members.describe_errors()
            return (
                f"no engine has taken groups for {seconds:.0f} s: {errors}. Fix what it reports and resume "
                "from the last checkpoint, or allow more time (--rollout-lost-minutes)"
            )
        if self._lock.locked():
            return None
        if not self._awake.is_set():
            return "engines sleep until the next publish: an iteration's last group had come before this call"
        for member in self._members.values():
            if member.engine.state is EngineState.READY or (member.task is not None and not member.task.done()):
                return None
        reason = self._members.describe_errors() or "none was started"
        return f"no engine is left for this version: {reason}. Resume from the last checkpoint"

    def _count_seconds_without(self) -> float:
        """Count the seconds for which no engine has taken groups; those of a publish do not count."""
        is_any_ready = any(member.engine.state is EngineState.READY for member in self._members.values())
        if is_any_ready or not self._is_current:
            self._none_since = None
            return 0.0
        if self._none_since is None:
            self._none_since = time.monotonic()
        return time.monotonic() - self._none_since

    def _run_for(self, member: Member, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background; when it is done, requests that wait for an engine are tried again."""
        member.task = asyncio.create_task(work)
        member.task.add_done_callback(lambda _: self.pool.engines_changed())


def _is_coming(member: Member) -> bool:
    """Check whether the engine is on its way up; one that is up waits for a publish, even if its task runs."""
    state = member.engine.state
    has_task = member.task is not None and not member.task.done()
    return state is EngineState.STARTING or (state not in UP and has_task)


def _must_be_up(member: Member) -> None:
    """Raise EngineLost unless the engine is up, because its task handles a loss."""
    if member.engine.state not in UP:
        raise EngineLost(member.error)


def _given(answer: ProbeAnswer) -> AwaitAnswer:
    async def give() -> ProbeAnswer:
        return answer

    return give
