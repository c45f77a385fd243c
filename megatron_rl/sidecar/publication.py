"""One attempt to bring a version to a set of engines. Each engine takes the steps by itself; all wait at every bar.

    pause | reach | load | commit, probe | open

Only engines that get a stream take the step `reach`: their workers connect to the trainer before any of them joins its
group. A group cannot lose a member, so the others are cut off soon after the first one fails in it.

No engine is tagged with the version before all have loaded it. None takes groups before all have come to the last bar:
if one fails, none is READY. Invariants:

- each step has a deadline, which follows from its latest durations (`attempts.py`); the error of a step names the
  engines and the reason;
- the attempt fails if an engine is lost while the other engines or the trainer are awaited;
- three fingerprints equal the announced one: that of the weights that an engine digested, that of its tag, and that of
  the token that it samples with the probe;
- after a load, parameters hold bit for bit what was published: all of them or, if the run accepts the weaker proof,
  those that can be compared;
- the engines' log-probs of the probe are within a bound of the trainer's, if it sends any, and within another bound of
  each other's.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from megatron_rl.errors import MegatronRLError
from megatron_rl.observe.trace import Recorder
from megatron_rl.shared.protocol import probe, wire
from megatron_rl.shared.protocol.probe import Difference, find_coarsest_dtype
from megatron_rl.shared.protocol.wire import EngineKind, ProbeAnswer, Response, Weights, decode_log_probs, decode_tokens
from megatron_rl.sidecar.attempts import Pace
from megatron_rl.sidecar.engines import (
    Engine,
    EngineLost,
    EngineRefused,
    NotCompared,
    WeightReport,
    WeightsNotWritten,
    WrongWeights,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_REASON_SECONDS = 5.0
"""The seconds that engines of a stream have for their own error once another one has failed."""


@dataclasses.dataclass(frozen=True)
class StepDeadlines:
    """The most seconds that each step may take, on every engine; less once it has been measured (`attempts.Pace`)."""

    pause: float = 60
    load: float = 600
    commit: float = 60
    probe: float = 120
    trainer: float = 600
    """Seconds to wait for the trainer's log-probs of the probe, once engines have given theirs."""
    reach: float = 60
    sleep: float = 120


@dataclasses.dataclass(frozen=True)
class Proof:
    """The proof of the weights that an engine holds."""

    engine: str
    report: WeightReport
    difference: Difference | None = None
    """The difference of its log-probs of the probe from the trainer's; None if they were not compared."""
    bound: float | None = None
    """The largest mean difference that is accepted."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A version that engines hold."""

    weights: Weights
    proofs: tuple[Proof, ...]
    probe: tuple[float, ...]
    answer: ProbeAnswer | None
    """The trainer's log-probs of the probe."""
    kinds: tuple[EngineKind, ...]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The seconds of each step on the slowest engine."""

    def build_answer(self) -> wire.PublishAnswer:
        least = min((proof.report for proof in self.proofs), key=lambda report: report.num_compared, default=None)
        ways = [proof.report.through for proof in self.proofs]
        return wire.PublishAnswer(
            kind=find_coarsest_kind(self.kinds),
            num_compared=0 if least is None else least.num_compared,
            num_parameters=0 if least is None else least.num_parameters,
            # Files if they differ.
            through=ways[0] if len(set(ways)) == 1 else "files",
            reasons=tuple(dict.fromkeys(reason for proof in self.proofs for reason in proof.report.reasons)),
        )


def find_coarsest_kind(kinds: Sequence[EngineKind]) -> EngineKind:
    """Combine the engines' kinds into the least precise one."""
    return EngineKind(
        dtype=find_coarsest_dtype(*(kind.dtype for kind in kinds)),
        device=next((kind.device for kind in kinds if kind.device != "cpu"), "cpu"),
        is_quantized=any(kind.is_quantized for kind in kinds),
        has_experts=any(kind.has_experts for kind in kinds),
        has_model=all(kind.has_model for kind in kinds),
    )


class StepFailed(MegatronRLError):
    """Some engines failed at a step of a publish."""

    def __init__(self, errors: Mapping[str, Exception]) -> None:
        self.errors = dict(errors)
        super().__init__("; ".join(str(error) or repr(error) for error in self.errors.values()))

    @property
    def wrong(self) -> dict[str, str]:
        """The engines that were proved to hold other weights than they report, each with the proof."""
        return {name: str(error) for name, error in self.errors.items() if isinstance(error, WrongWeights)}

    @property
    def is_for_nothing(self) -> bool:
        """True if another attempt must fail too: the announced weights are not written, or cannot be compared."""
        return any(isinstance(error, WeightsNotWritten | NotCompared) for error in self.errors.values())

    @property
    def lost(self) -> list[str]:
        """The engines that are lost and need a restart."""
        return [name for name, error in self.errors.items() if isinstance(error, EngineLost)]


class NotBegun(StepFailed):
    """Some engines failed before any of them had begun to load."""


class TrainerSilent(MegatronRLError):
    """The trainer did not send its log-probs of the probe."""


AwaitAnswer = Callable[[], Awaitable[ProbeAnswer]]
"""A wait for the trainer's log-probs of the probe."""


class Steps:
    """Takes engines through the steps; `current` has each engine's step and the time of its begin."""

    def __init__(self, deadlines: StepDeadlines = StepDeadlines(), recorder: Recorder | None = None) -> None:
        self.current: dict[str, tuple[str, float]] = {}
        self._deadlines = deadlines
        self._recorder = recorder or Recorder(most=0)
        self._pace = Pace()
        self._seconds: dict[str, float] = {}
        self._measured: dict[str, float] = {}
        """The seconds of each step on the slowest engine, without its wait for the trainer."""

    async def publish(
        self, engines: Sequence[Engine], weights: Weights, before: Published | None, answer: AwaitAnswer | None = None
    ) -> Published:
        """Take all steps; `before` is the version that engines were last brought to, if it is known."""
        self._seconds, self._measured = {}, {}
        tokens = decode_tokens(weights.probe).tolist()
        await self._all(engines, lambda engine: self._take("pause", engine, engine.pause), NotBegun)
        if weights.is_streamed:
            reports = await self._receive(engines, weights)
        else:
            reports = await self._all(engines, lambda engine: self._load(engine, weights))
        probes = await self._all(engines, lambda engine: self._commit(engine, weights, reports[engine.name], tokens))
        waiting = time.monotonic()
        of_trainer = None if answer is None else await self._answer(answer, weights, engines)
        self._seconds["trainer"] = time.monotonic() - waiting
        proofs = [Proof(name, report) for name, report in reports.items()]
        if of_trainer is not None:
            proofs = [
                _compared(proof, probes[proof.engine], engine.kind, weights, of_trainer)
                for proof, engine in zip(proofs, engines, strict=True)
            ]
            _must_be_the_trainers(proofs, weights)
        kinds = tuple(engine.kind for engine in engines)
        _must_agree(probes, kinds, weights, before, None if of_trainer is None else of_trainer.agreement)
        for engine in engines:
            begun = self._recorder.now()
            engine.open()
            self._note(engine.name, "open", begun)
        for step, seconds in self._measured.items():
            self._pace.note(step, seconds)
        return Published(weights, tuple(proofs), tuple(next(iter(probes.values()))), of_trainer, kinds, self._seconds)

    async def _receive(self, engines: Sequence[Engine], weights: Weights) -> dict[str, WeightReport]:
        """Load what the trainer streams to all engines at once."""
        await self._all(engines, lambda engine: self._take("reach", engine, lambda: engine.reach(weights)), NotBegun)
        first_failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def load(engine: Engine) -> WeightReport:
            loading = asyncio.create_task(self._load(engine, weights))
            try:
                await asyncio.wait((loading, first_failed), return_when=asyncio.FIRST_COMPLETED)
                if not loading.done():
                    # It may have a reason of its own, which says more.
                    await asyncio.wait((loading,), timeout=_REASON_SECONDS)
                if not loading.done():
                    raise EngineLost(
                        f"engine {engine.name}: its load was cut off, because engine {first_failed.result()} had left "
                        f"the stream\n{engine.last_words()}"
                    )
                return loading.result()
            except Exception as error:
                # These two are found after an engine has received everything, and keep no other one waiting.
                if not isinstance(error, NotCompared | WrongWeights) and not first_failed.done():
                    first_failed.set_result(engine.name)
                raise
            finally:
                loading.cancel()

        try:
            return await self._all(engines, load)
        except StepFailed as failure:
            # The cause comes before its consequences.
            cause = first_failed.result() if first_failed.done() else ""
            raise StepFailed(dict(sorted(failure.errors.items(), key=lambda item: item[0] != cause))) from None

    async def _load(self, engine: Engine, weights: Weights) -> WeightReport:
        def waits_for_trainer() -> bool:
            return engine.host.is_being_written(weights)

        report = await self._take(
            "load", engine, lambda: engine.load(weights), weights.deadline_seconds, waits_for_trainer
        )
        _must_equal("load", engine, report, weights)
        _must_be_compared(engine, report, weights)
        return report

    async def _commit(
        self, engine: Engine, weights: Weights, report: WeightReport, tokens: Sequence[int]
    ) -> list[float]:
        """Tag a loaded engine with the version, and return its log-probs of the probe."""
        held = await self._take("commit", engine, lambda: engine.commit(report))
        _must_equal("commit", engine, held, weights)
        probed = await self._take("probe", engine, lambda: engine.probe(tokens))
        _must_be_sampled_with(engine, probed.response, weights)
        return probed.log_probs

    async def _answer(self, answer: AwaitAnswer, weights: Weights, engines: Sequence[Engine]) -> ProbeAnswer:
        """Wait for the trainer's log-probs, until an engine is lost."""
        seconds = weights.deadline_seconds or self._deadlines.trainer
        answering = asyncio.ensure_future(answer())
        losses = {engine.name: asyncio.create_task(_until_lost(engine)) for engine in engines}
        try:
            await asyncio.wait((answering, *losses.values()), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return answering.result()
            lost = {name: loss.result() for name, loss in losses.items() if loss.done()}
        finally:
            for task in (answering, *losses.values()):
                task.cancel()
        if lost:
            raise StepFailed(lost)
        raise TrainerSilent(
            f"the trainer did not send its log-probs of version {weights.version}'s probe within {seconds:g} s"
        )

    async def _take(
        self,
        step: str,
        engine: Engine,
        action: Callable[[], Awaitable[T]],
        given_seconds: float | None = None,
        waits_for_trainer: Callable[[], bool] = lambda: False,
    ) -> T:
        """Have an engine take a step; while it waits for the trainer, only the configured deadline counts."""
        most = given_seconds or getattr(self._deadlines, step)
        seconds = self._pace.deadline(step, most)
        begun = time.monotonic()
        with self._at(engine.name, step):
            try:
                async with asyncio.timeout(most), _timeout_after(seconds, waits_for_trainer) as count:
                    done = await action()
                self._measured[step] = max(self._measured.get(step, 0.0), count())
                return done
            except TimeoutError:
                self._pace.note(step, seconds)
                passed = round(time.monotonic() - begun, 1)
                raise EngineLost(
                    f"engine {engine.name}: {step} did not finish within {passed:g} s\n{engine.last_words()}"
                ) from None
            except EngineLost as loss:
                # The other engines may take long, and the error is raised only after them.
                _log.warning("%s", loss)
                raise
            finally:
                self._seconds[step] = max(self._seconds.get(step, 0.0), time.monotonic() - begun)
                self._note(engine.name, step, begun)

    def _note(self, engine: str, step: str, begun: float) -> None:
        self._recorder.add(self._recorder.kind(engine, step), begun, self._recorder.now())

    async def _all(
        self,
        engines: Sequence[Engine],
        action: Callable[[Engine], Awaitable[T]],
        failure: type[StepFailed] = StepFailed,
    ) -> dict[str, T]:
        """Wait for all engines, even if some fail: no step of an engine is interrupted."""
        results = await asyncio.gather(*map(action, engines), return_exceptions=True)
        done: dict[str, T] = {}
        errors: dict[str, Exception] = {}
        for engine, result in zip(engines, results, strict=True):
            if isinstance(result, Exception):
                errors[engine.name] = result
            elif isinstance(result, BaseException):
                raise result
            else:
                done[engine.name] = result
        if errors:
            raise failure(errors)
        return done

    @contextlib.contextmanager
    def _at(self, name: str, step: str) -> Iterator[None]:
        self.current[name] = (step, time.monotonic())
        try:
            yield
        finally:
            del self.current[name]


@contextlib.asynccontextmanager
async def _timeout_after(seconds: float, waits: Callable[[], bool]) -> AsyncIterator[Callable[[], float]]:
    """Raise TimeoutError when `waits` has been false for `seconds`; yield a function that counts them."""
    loop = asyncio.get_running_loop()
    since = loop.time()

    async def follow(timeout: asyncio.Timeout) -> None:
        nonlocal since
        while waits():
            since = loop.time()
            timeout.reschedule(since + seconds)
            await asyncio.sleep(_POLL_SECONDS)

    async with asyncio.timeout(seconds) as timeout:
        following = asyncio.create_task(follow(timeout))
        try:
            yield lambda: loop.time() - since
        finally:
            following.cancel()


async def _until_lost(engine: Engine) -> EngineLost:
    """Wait until an engine is lost, and return the error. It has just answered, and is not asked at once."""
    await asyncio.sleep(_POLL_SECONDS)
    while (fault := await engine.find_fault()) is None:
        await asyncio.sleep(_POLL_SECONDS)
    return EngineLost(f"engine {engine.name}: {fault}, while the trainer was awaited\n{engine.last_words()}")


def _must_agree(
    probes: Mapping[str, list[float]],
    kinds: Sequence[EngineKind],
    weights: Weights,
    before: Published | None,
    given: float | None,
) -> None:
    """Raise StepFailed unless the engines' log-probs of the probe are within a bound of each other's."""
    # An earlier probe of the same weights shows which engine is wrong; two engines alone only differ.
    wanted = weights.version, weights.fingerprint
    known = before if before and (before.weights.version, before.weights.fingerprint) == wanted else None
    kind = find_coarsest_kind(kinds if known is None else (*kinds, *known.kinds))
    bound = probe.find_agreement(kind) if given is None else given
    errors: dict[str, Exception] = {}
    if known is not None:
        errors = _find_far(probes, known.probe, "the other engines with the same weights", weights, bound)
    if not errors:
        # NaN has no place in an order, and would accuse every engine.
        middle = [
            statistics.median(math.inf if math.isnan(value) else value for value in values)
            for values in zip(*probes.values(), strict=True)
        ]
        errors = _find_far(probes, middle, "all engines", weights, bound)
    if errors:
        raise StepFailed(errors)


def _find_far(
    probes: Mapping[str, list[float]], middle: Sequence[float], whose: str, weights: Weights, bound: float
) -> dict[str, Exception]:
    """Find the engines whose log-probs are farther than the bound from the middle ones."""
    errors: dict[str, Exception] = {}
    for name, log_probs in probes.items():
        found = probe.measure_difference(log_probs, middle)
        # In this form NaN, on either side, is not within the bound.
        if not found.mean <= bound:
            errors[name] = EngineRefused(
                f"engine {name}: its log-probs of the probe are {found.mean:.3g} on average (at most "
                f"{found.largest:.3g}) from those of {whose}, beyond {bound:g} (--publish-agreement-bound). Either it "
                f"does not hold version {weights.version}, or it computes differently. In that case give all engines "
                f"one --rollout-dtype and one kind of device, or write a wider bound"
            )
    return errors


def _must_equal(step: str, engine: Engine, report: WeightReport, weights: Weights) -> None:
    if report != WeightReport(weights.version, weights.fingerprint):
        raise EngineRefused(
            f"engine {engine.name}: {step} reports version {report.version} with fingerprint {report.fingerprint!r}, "
            f"and version {weights.version} with {weights.fingerprint!r} was published"
        )


def _must_be_compared(engine: Engine, report: WeightReport, weights: Weights) -> None:
    if weights.proof == "digests" and report.num_compared < report.num_parameters:
        raise NotCompared(
            f"engine {engine.name}, which computes in {engine.kind.dtype}: {report.num_compared} of "
            f"{report.num_parameters} parameters can be compared bit for bit with what is published in "
            f"{weights.dtype}, and not {', '.join(report.uncompared[:3])}. Write one precision for both "
            "(--rollout-dtype, --publish-dtype) and no quantization without a proof, or accept the weaker one with "
            "--publish-proof probe"
        )


def _must_be_sampled_with(engine: Engine, response: Response, weights: Weights) -> None:
    found = ({span.version for span in response.spans}, response.fingerprint)
    if found != ({str(weights.version)}, weights.fingerprint):
        raise EngineRefused(
            f"engine {engine.name}: its first token after version {weights.version} was published has {found}"
        )


def _compared(
    proof: Proof, of_engine: Sequence[float], kind: EngineKind, weights: Weights, of_trainer: ProbeAnswer
) -> Proof:
    if not kind.has_model:
        return proof
    log_probs, bound = decode_log_probs(of_trainer.log_probs).tolist(), of_trainer.bound
    if bound is None:
        bound = probe.limit_by_spread(probe.find_bound(kind, of_trainer.dtype, weights.dtype), kind, log_probs)
    found = probe.measure_difference(of_engine, log_probs)
    return dataclasses.replace(proof, difference=found, bound=bound)


def _must_be_the_trainers(proofs: Sequence[Proof], weights: Weights) -> None:
    errors: dict[str, Exception] = {}
    for proof in proofs:
        # In this form NaN is not within the bound.
        if proof.difference is not None and proof.bound is not None and not proof.difference.mean <= proof.bound:
            errors[proof.engine] = WrongWeights(
                f"engine {proof.engine}: its log-probs of the probe differ from those that the trainer computes with "
                f"version {weights.version} by {proof.difference.mean:.3g} on average (at most "
                f"{proof.difference.largest:.3g}), beyond {proof.bound:g} (--publish-probe-bound): it does not hold "
                f"version {weights.version}"
            )
    if errors:
        raise StepFailed(errors)
