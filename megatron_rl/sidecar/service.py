"""The rollout service: takes an iteration's prompts and returns slots of finished, scored, on-policy groups.

Its parts keep its promises. The iteration (`sidecar/iteration.py`) decides which groups each slot holds. The pool finds
an engine for each group, the scorer rewards it, and the journal and the audit log record it.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from megatron_rl.errors import MegatronRLError
from megatron_rl.observe.trace import SERVICE
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import Assignment
from megatron_rl.shared.protocol.slots import Place
from megatron_rl.shared.records.append_file import AppendFailed
from megatron_rl.sidecar.evaluation import EvaluationRun, Measure, measure_nothing
from megatron_rl.sidecar.group_maker import Counters, GroupHolder, GroupMaker, Samplers, Scorer
from megatron_rl.sidecar.in_flight.control import Pacer
from megatron_rl.sidecar.iteration import Iteration
from megatron_rl.sidecar.members import cancel
from megatron_rl.sidecar.publication import AwaitAnswer, Published
from megatron_rl.sidecar.recorder import RunRecorder, SidecarTrace
from megatron_rl.sidecar.supervisor import WeightsNotProven

if TYPE_CHECKING:
    from megatron_rl.sidecar.hosts.membership import Hosts
    from megatron_rl.sidecar.teachers import Teachers

_log = logging.getLogger(__name__)


class Conflict(MegatronRLError):
    """The caller does not hold the lease, or the call does not fit the state of the service."""


class Engines(Samplers, Protocol):
    async def publish(self, weights: wire.Weights, answer: AwaitAnswer | None = None) -> Published: ...

    async def sleep(self) -> None: ...

    def add(self, count: int = 1) -> list[str]: ...

    async def adopt(self, address: str) -> str: ...

    def remove(self, name: str) -> None: ...

    async def count_drafts(self) -> wire.Drafts | None: ...

    def status(self) -> dict[str, Any]: ...


@dataclasses.dataclass
class Lease:
    """The trainer that the service works for. A run that returns takes over the lease of its former trainer."""

    run: str = ""
    number: int = dataclasses.field(default_factory=lambda: time.time_ns() // 1000)
    """The number of the lease, counted from the clock's microseconds, so that a later sidecar never repeats one."""
    renewed: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Publication:
    """A publish that runs or is over, and the lease that it was asked for under."""

    lease: Lease
    weights: wire.Weights
    task: "asyncio.Task[wire.PublishAnswer]"

    def answers(self, lease: Lease, weights: wire.Weights) -> bool:
        """Check whether its result is that of this request; a publish that failed is tried again."""
        has_failed = self.task.done() and (self.task.cancelled() or self.task.exception() is not None)
        return self.lease is lease and self.weights == weights and not has_failed


class RolloutService:
    """The state of a sidecar and the operations on it; `sidecar/http.py` has its routes."""

    def __init__(
        self,
        engines: Engines,
        scorer: Scorer,
        records: RunRecorder,
        lease_seconds: float = 60.0,
        run: str | None = None,
        trace: SidecarTrace | None = None,
        pacer: Pacer | None = None,
        hosts: "Hosts | None" = None,
        conversations: GroupHolder | None = None,
        count_calls: Callable[[], Mapping[str, Any]] = dict,
        measure: Measure = measure_nothing,
        teachers: "Teachers | None" = None,
    ):
        """Start without a lease. With `run`, no other run is served: the records belong to that run.

        Without a pacer, nothing is known about the responses that engines are given at once. With `conversations`, each
        response is one of them, and `count_calls` returns their counters. `measure` belongs to each evaluation.
        """
        self.engines = engines
        self.hosts = hosts
        if hosts is not None:
            hosts.find_trainer_lease = lambda: self._publishing_lease
        self._records = records
        self._lease_seconds = lease_seconds
        self._only_run = run
        self.lease = Lease()
        self.counters = Counters()
        self._trace = trace or SidecarTrace()
        self._pacer = pacer
        self._count_calls = count_calls
        self._conversations = conversations
        self._measure = measure
        # Those of the last iteration.
        self._environment_times: wire.EnvironmentTimes | None = None
        self._maker = GroupMaker(engines, scorer, self.counters, self._trace.recorder, conversations, teachers)
        self._submitted_at = 0.0
        self.iteration: Iteration | None = None
        self.evaluation: EvaluationRun | None = None
        self.weights: wire.Weights | None = None
        self._task: asyncio.Task[None] | None = None
        self._publishing = asyncio.Lock()
        self._publishing_lease = 0
        """The number of the lease under which engines were last given a version."""
        self._publication: _Publication | None = None
        """The last publish, until an iteration shows that the trainer has got its answer."""
        self._probe = _AwaitedAnswer()
        # One future for each slot, for all ranks of a replica that wait for it.
        self._waiting: dict[Place, asyncio.Future[None]] = {}
        self._has_failed = False
        # The numbers of groups of the iteration before: those without a signal, and all that were considered.
        self._seen = (0, 0)
        self._next = asyncio.Event()
        """The event that the next submission sets and replaces."""

    async def take_lease(self, run: str) -> int:
        """Work for this run from now on; return the number that its requests must carry.

        A running iteration ends, because its trainer is gone or no longer holds the lease. Its finished groups are
        recorded, and are restored when the same iteration is submitted again.
        """
        if self._only_run not in (None, run):
            raise Conflict(
                f"this sidecar keeps the records of the run {self._only_run!r}, and this trainer is the run {run!r}: "
                f"give both a --rollout-folder of the same name, or start a sidecar for {run!r}"
            )
        lease, now = self.lease, time.monotonic()
        if lease.run not in ("", run) and now - lease.renewed < self._lease_seconds:
            raise Conflict(
                f"this sidecar works for the run {lease.run!r}: start another sidecar, end that run, or wait "
                f"{self._lease_seconds:.0f} s after its last request"
            )
        self.lease = mine = Lease(run, lease.number + 1, now)
        # The trainer that would have answered the probe is gone, and its answers are not this one's.
        self._probe.call_off(f"lease {lease.number} is over: another trainer has taken this sidecar")
        self._probe = _AwaitedAnswer()
        if self.iteration is not None and not self.iteration.is_over:
            self._fail(self.iteration, f"the run {run!r} was started again, and another trainer holds the lease now")
            await self._stop()
        if self.evaluation is not None:
            await self.evaluation.stop(f"the run {run!r} was started again, and another trainer holds the lease now")
        if self.lease is not mine:
            raise Conflict("another trainer took this sidecar at the same moment")
        # Forget even an iteration that is over and has a version that this trainer will need: it submits its own.
        self.iteration = None
        return mine.number

    def renew_lease(self, number: int) -> None:
        """Check and renew the lease, with every request of the trainer; only its newest holder succeeds."""
        if number != self.lease.number:
            if not self.lease.run:
                raise Conflict(
                    f"lease {number} is over: this sidecar was started after it was taken; start the trainer again, to "
                    "resume from its checkpoint"
                )
            raise Conflict(
                f"lease {number} is over and {self.lease.number} is held: another trainer has taken this sidecar. End "
                "one of the two, or give each its own sidecar, and start the other again"
            )
        self.lease.renewed = time.monotonic()

    async def publish(self, weights: wire.Weights) -> wire.PublishAnswer:
        """Bring a version to all engines or none. A repeated request gets the result of the first one."""
        if weights.run != self.lease.run:
            raise Conflict(f"the lease is held by the run {self.lease.run!r}, not by {weights.run!r}")
        self._must_not_run("publishing")
        self._must_not_evaluate("publishing")
        begun = self._publication
        if begun is None or not begun.answers(self.lease, weights):
            task = asyncio.create_task(self._publish(weights, self._probe))
            begun = self._publication = _Publication(self.lease, weights, task)
        # If this request breaks off, the repeated one gets the result.
        return await asyncio.shield(begun.task)

    async def _publish(self, weights: wire.Weights, probe: "_AwaitedAnswer") -> wire.PublishAnswer:
        async with self._publishing:
            # The lease may have changed during the publish before.
            probe.must_be_awaited()
            lease = self.lease.number
            # It samples groups ahead that are no longer needed.
            await self._stop()
            self._trace.begin(weights.version)
            start = time.monotonic()
            # Until all engines hold the version, it is unknown which one each of them holds.
            self.weights = None
            try:
                published = await self.engines.publish(weights, probe.await_for(weights) if weights.probe else None)
            except WeightsNotProven as error:
                self._records.not_proven(weights, error.wrong)
                raise
            finally:
                self._note("publish", start, weights.version)
            self._records.published(weights, published.proofs)
            self.weights, self._publishing_lease = weights, lease
            self.counters.publishes += 1
            self.counters.publish_seconds = time.monotonic() - start
            return published.build_answer()

    def probed(self, answer: wire.ProbeAnswer) -> None:
        """Take the trainer's log-probs of a version's probe, which may come before its publish."""
        if answer.run != self.lease.run:
            raise Conflict(f"the lease is held by the run {self.lease.run!r}, not by {answer.run!r}")
        self._probe.give(answer)

    async def submit(self, submission: wire.Submission) -> None:
        """Start an iteration. A repeated submission changes nothing; another one replaces an iteration that is over."""
        if self.iteration is not None and self.iteration.is_same(submission):
            return
        self._check_held(submission, "submitted")
        version = submission.version
        self._must_not_run(f"submitting iteration {version}")
        await self._stop()
        iteration = Iteration(
            submission,
            self._records.finished,
            self._records.claimed,
            lambda: self._records.completed(version),
            self._seen,
        )
        groups, claims = self._records.begin(submission)
        iteration.restore(groups, claims)
        self._records.restored()
        self.counters.reused += len(groups)
        self.iteration, self._publication = iteration, None
        self._submitted_at = time.monotonic()
        self._has_failed = False
        if self._pacer is not None:
            await self._pacer.begin(submission.plan)
        self._next, reached = asyncio.Event(), self._next
        reached.set()
        self._task = asyncio.create_task(self._run(iteration))

    async def evaluate(self, evaluation: wire.Evaluation) -> None:
        """Start an evaluation, beside an iteration or alone; a repeated request changes nothing.

        Its groups use the engines that the iteration leaves free, and reach neither a slot nor the journal.
        """
        if self.evaluation is not None and self.evaluation.is_same(evaluation):
            return
        self._check_held(evaluation, "to be evaluated")
        self._must_not_evaluate(f"evaluating {len(evaluation.prompts)} other prompts")

        def record(evaluation: wire.Evaluation, groups: list[wire.Group]) -> None:
            self._records.evaluated(evaluation, groups)
            self.counters.evaluations += 1
            self._note("evaluation", begun, evaluation.version)

        begun = time.monotonic()
        self.evaluation = EvaluationRun(evaluation, self._maker.make_all, record, self._measure)

    async def evaluated(self, version: int, patience: float) -> bytes | None:
        """Wait for the encoded `wire.Evaluated`; return None if it takes more than `patience` seconds."""
        if self.evaluation is None or self.evaluation.version != version:
            which = f"the last was of version {self.evaluation.version}" if self.evaluation else "there was none"
            raise Conflict(f"version {version} is not being evaluated, {which}: POST /v1/evaluations first")
        return await self.evaluation.answer(patience)

    async def slot(self, version: int, replica: int, index: int, patience: float) -> bytes | None:
        """Wait for the slot's bytes; return None if they take more than `patience` seconds.

        A rank may ask before another rank has submitted the iteration.
        """
        deadline = time.monotonic() + patience
        iteration = await self._submitted(version, patience)
        if iteration is None:
            return None
        while True:
            answer = self._claim(iteration, replica, index)
            remaining = deadline - time.monotonic()
            if answer is not None or remaining <= 0:
                return answer
            place = Place(replica, index)
            if place not in self._waiting:
                self._waiting[place] = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiting[place]], timeout=remaining)

    async def sleep(self, version: int) -> None:
        """Have engines give their devices to the ranks, which have all slots of this iteration."""
        iteration = self._find_iteration(version)
        if not iteration.is_claimed:
            raise Conflict(f"engines sleep once every slot of iteration {version} has come: {iteration.missing()}")
        self._must_not_evaluate("engines sleep")
        # It samples groups that are no longer needed.
        await self._stop()
        # Until the next publish engines hold no version.
        self.weights = None
        await self.engines.sleep()

    def complete(
        self,
        version: int,
        trained: wire.Trained | None = None,
        drafts: wire.Drafts | None = None,
    ) -> wire.Ended:
        """End an iteration that the trainer has trained on, as it reports.

        With the hash of the audit log's head, the trainer can prove later that the log up to that line is unchanged.
        """
        iteration = self._find_iteration(version)
        was_over = iteration.is_over
        try:
            if trained is not None and not was_over:
                self._records.trained(version, trained)
            iteration.complete()
        except AppendFailed as error:
            self._fail(iteration, str(error))
            raise
        if not was_over:
            self._note("iteration", self._submitted_at, version)
            if self._conversations is not None:
                self._environment_times = self._conversations.clock.end_iteration()
            self._trace.end()
        num_in_flight = None
        if self._pacer is not None:
            num_in_flight = self._pacer.opening.num_in_flight
            if not was_over:
                seconds = None if trained is None else trained.seconds
                self._pacer.end(None if isinstance(seconds, msgspec.UnsetType) else seconds)
        census = iteration.census()
        self._seen = (census.num_without_signal, census.num_considered)
        head, line = self._records.head()
        return wire.Ended(
            version=version,
            head=head,
            line=line,
            census=census,
            num_in_flight=num_in_flight,
            environments=self._environment_times,
            drafts=drafts,
        )

    async def refuse(self, version: int, mismatch: wire.Mismatch) -> None:
        """Fail an iteration that the trainer will not train on: its tokens do not belong to the trainer's policy."""
        iteration = self._find_iteration(version)
        if not iteration.is_over:
            self._records.judged(version, mismatch)
            self._fail(iteration, f"log-probs differ by {mismatch.mean:.3g} on average, beyond {mismatch.bound}")
        await self._stop()

    async def close(self) -> None:
        """Stop a running iteration and a running evaluation."""
        if self.iteration is not None and not self.iteration.is_over:
            self._fail(self.iteration, "the sidecar was asked to end")
        await self._stop()
        if self.evaluation is not None:
            await self.evaluation.stop("the sidecar was asked to end")
        if self._pacer is not None:
            await self._pacer.close()
        self._trace.end_last()

    def status(self) -> dict[str, Any]:
        """Return the state of the service, its engines and the requests that wait."""
        iteration = self.iteration
        return {
            "run": self.lease.run,
            "lease": self.lease.number,
            "version": self.weights.version if self.weights else None,
            "fingerprint": self.weights.fingerprint if self.weights else None,
            "iteration": iteration.status() if iteration else None,
            "evaluation": self.evaluation.status() if self.evaluation else None,
            "slots_waited_for": [list(place) for place in self._waiting],
            "engines": self.engines.status(),
            "hosts": {} if self.hosts is None else self.hosts.status(),
            "max_in_flight": self._pacer.room if self._pacer is not None else None,
            "counters": dataclasses.asdict(self.counters) | dict(self._count_calls()),
        }

    def _note(self, name: str, begun: float, version: int) -> None:
        recorder = self._trace.recorder
        recorder.add(recorder.kind(SERVICE, name), begun, recorder.now(), version)

    def _check_held(self, assignment: Assignment, what: str) -> None:
        if assignment.run != self.lease.run:
            raise Conflict(f"the lease is held by the run {self.lease.run!r}, not by {assignment.run!r}")
        held = self.weights
        if held is None or (held.version, held.fingerprint) != (assignment.version, assignment.fingerprint):
            text = f"{held.version} ({held.fingerprint[:12]})" if held else "none"
            raise Conflict(
                f"version {assignment.version} ({assignment.fingerprint[:12]}) is {what}, and the engines hold {text}: "
                f"publish it first"
            )
        has_environments = self._conversations is not None
        if has_environments != (assignment.sampling.max_turns > 0):
            which = "the trainer" if has_environments else "the sidecar"
            raise Conflict(
                f"{which} was started without --rollout-env, --rollout-agent and --rollout-verifiers, and the other "
                "with one of them: give both the same"
            )

    def _must_not_run(self, before: str) -> None:
        if self.iteration is not None and not self.iteration.is_over:
            raise Conflict(f"iteration {self.iteration.version} is running: complete or refuse it before {before}")

    def _must_not_evaluate(self, before: str) -> None:
        if self.evaluation is not None and not self.evaluation.is_over:
            raise Conflict(
                f"an evaluation of version {self.evaluation.version} is running, {self.evaluation.missing()}: wait "
                f"for it with GET /v1/evaluations/{self.evaluation.version} before {before}"
            )

    async def _submitted(self, version: int, patience: float) -> Iteration | None:
        """Wait until the iteration is submitted; return None if it is not within `patience` seconds."""
        deadline, lease = time.monotonic() + patience, self.lease
        while self.iteration is None or self.iteration.version < version:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._next.wait(), remaining)
            if self.lease is not lease:
                raise Conflict(f"lease {lease.number} is over: another trainer has taken this sidecar")
        return self._find_iteration(version)

    def _find_iteration(self, version: int) -> Iteration:
        if self.iteration is None:
            raise Conflict(f"iteration {version} was not submitted: submit it first")
        if self.iteration.version != version:
            raise Conflict(
                f"iteration {version} is not the current one, {self.iteration.version}: it is over, or "
                f"not submitted yet"
            )
        return self.iteration

    async def _run(self, iteration: Iteration) -> None:
        """Make every missing group, or fail the iteration with the reason."""
        reason = await self._maker.make_all(iteration.submission, _IterationWork(iteration, self._answer))
        if reason is not None:
            self._fail(iteration, reason)

    def _claim(self, iteration: Iteration, replica: int, index: int) -> bytes | None:
        try:
            return iteration.claim(replica, index, iteration.version)
        except AppendFailed as error:
            # The iteration itself has already failed; this tells all other requests that wait for it.
            self._fail(iteration, str(error))
            raise

    def _answer(self, place: Place) -> None:
        future = self._waiting.pop(place, None)
        if future is not None and not future.done():
            future.set_result(None)

    def _fail(self, iteration: Iteration, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            iteration.failed(reason)
            # The log itself may have failed; the trainer gets the reason anyway.
            with contextlib.suppress(OSError, MegatronRLError):
                self._records.failed(iteration.version, iteration.failure or reason)
        for place in list(self._waiting):
            self._answer(place)

    async def _stop(self) -> None:
        await cancel(self._task)
        self._task = None


class _IterationWork:
    """The groups of an iteration, in the form that `GroupMaker` needs."""

    def __init__(self, iteration: Iteration, answer: Callable[[Place], None]) -> None:
        """Wrap an iteration; `answer` wakes the requests that wait for a slot."""
        self.next_prompt = iteration.next_prompt
        self.is_wanted = iteration.is_wanted
        self.missing = iteration.missing
        self._iteration = iteration
        self._answer = answer

    def finished(self, group: wire.Group) -> None:
        for place in self._iteration.finished(group):
            self._answer(place)


class _AwaitedAnswer:
    """The answer to the newest probe of one lease, for the publish that waits for it."""

    def __init__(self) -> None:
        self._answer: wire.ProbeAnswer | None = None
        self._changed = asyncio.Event()
        self._called_off = ""

    def give(self, answer: wire.ProbeAnswer) -> None:
        self._answer = answer
        self._changed.set()

    def call_off(self, reason: str) -> None:
        """End each wait, now and later: no answer will come."""
        self._called_off = reason
        self._changed.set()

    def must_be_awaited(self) -> None:
        """Raise a Conflict once no answer will come."""
        if self._called_off:
            raise Conflict(self._called_off)

    def await_for(self, weights: wire.Weights) -> AwaitAnswer:
        """Return a wait for the answer to the probe of these weights. One for others belongs to another publish."""
        wanted = weights.version, weights.fingerprint

        async def wait() -> wire.ProbeAnswer:
            while True:
                self.must_be_awaited()
                answer = self._answer
                if answer is not None and (answer.version, answer.fingerprint) == wanted:
                    return answer
                self._changed.clear()
                await self._changed.wait()

        return wait
