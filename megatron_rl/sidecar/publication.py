"""One attempt to bring a version to a set of engines: every engine takes a step before any takes the next.

    pause, load, commit, verify, probe | resume, sample

Up to the bar nothing samples: an engine that fails there leaves all of them paused. Invariants:

- each step has a deadline; a step that fails names the engines and why;
- the fingerprints that engines digested, and those they are tagged with, are the announced one;
- what an engine holds after a load is bit for bit what it was given, as far as it can compare the two;
- the engines' log-probs of the probe are within a bound of the trainer's, if the trainer sends any; engines with the
  same weights give the same ones.
"""

import asyncio
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from megatron_rl.errors import MegatronRLError
from megatron_rl.protocol import probe
from megatron_rl.protocol.probe import Difference
from megatron_rl.protocol.wire import EngineKind, ProbeAnswer, Sampling, Weights, decode_log_probs, decode_tokens
from megatron_rl.sidecar.engines import (
    Engine,
    EngineLost,
    EngineRefused,
    GroupRequest,
    WeightReport,
    WrongWeights,
)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StepDeadlines:
    """Seconds that each step may take, on every engine."""

    pause: float = 60
    load: float = 600
    commit: float = 60
    verify: float = 60
    probe: float = 120
    resume: float = 60
    sample: float = 120
    trainer: float = 600
    """For the trainer's log-probs of the probe, once engines have given theirs."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """What is known of the weights that an engine holds."""

    engine: str
    report: WeightReport
    difference: Difference | None = None
    """Between its log-probs of the probe and the trainer's; None where they were not compared."""
    bound: float | None = None
    """Of the mean difference."""


@dataclasses.dataclass(frozen=True)
class Published:
    """A version as engines hold it."""

    weights: Weights
    proofs: tuple[Proof, ...]
    probe: tuple[float, ...]
    answer: ProbeAnswer | None
    """The trainer's log-probs of the probe."""
    kinds: tuple[EngineKind, ...]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What each step took."""


def find_coarsest_kind(kinds: Sequence[EngineKind]) -> EngineKind:
    """The least precise kind that fits all of these engines together."""
    return EngineKind(
        dtype=probe.find_coarsest_dtype(*(kind.dtype for kind in kinds)),
        device=next((kind.device for kind in kinds if kind.device != "cpu"), "cpu"),
        is_quantized=any(kind.is_quantized for kind in kinds),
        has_experts=any(kind.has_experts for kind in kinds),
        has_model=all(kind.has_model for kind in kinds),
    )


class StepFailed(MegatronRLError):
    """A step of a publish failed on some engines."""

    def __init__(self, step: str, errors: Mapping[str, Exception]) -> None:
        self.step = step
        self.errors = dict(errors)
        super().__init__("; ".join(str(error) or repr(error) for error in self.errors.values()))

    @property
    def wrong(self) -> dict[str, str]:
        """The engines that were proved to hold other weights than they report, and how."""
        return {name: str(error) for name, error in self.errors.items() if isinstance(error, WrongWeights)}

    @property
    def lost(self) -> list[str]:
        """The engines that are gone and need a restart."""
        return [name for name, error in self.errors.items() if isinstance(error, EngineLost)]


class TrainerSilent(MegatronRLError):
    """The trainer did not send its log-probs of the probe."""


AwaitAnswer = Callable[[], Awaitable[ProbeAnswer]]
"""Waits for the trainer's log-probs of the probe."""


class Steps:
    """Takes engines through the steps; `current` has each engine's step and since when."""

    def __init__(self, deadlines: StepDeadlines = StepDeadlines(), probe_tolerance: float = 1e-5) -> None:
        self.current: dict[str, tuple[str, float]] = {}
        self._deadlines = deadlines
        self._probe_tolerance = probe_tolerance
        self._seconds: dict[str, float] = {}

    async def publish(
        self, engines: Sequence[Engine], weights: Weights, before: Published | None, answer: AwaitAnswer | None = None
    ) -> Published:
        """Take all steps; `before` is what engines were last brought to, if that is known."""
        self._seconds = {}
        wanted = WeightReport(weights.version, weights.fingerprint)
        await self._all("pause", engines, lambda engine: engine.pause())
        reports = await self._all("load", engines, lambda engine: engine.load(weights))
        _must_equal("load", reports, wanted)
        await self._all("commit", engines, lambda engine: engine.commit(reports[engine.name]))
        tags = await self._all("verify", engines, lambda engine: engine.verify())
        _must_equal("verify", tags, wanted)
        tokens = decode_tokens(weights.probe).tolist()
        probes = await self._all("probe", engines, lambda engine: engine.probe(tokens))
        waiting = time.monotonic()
        of_trainer = None if answer is None else await self._answer(answer, weights)
        self._seconds["trainer"] = time.monotonic() - waiting
        proofs = [Proof(name, reports[name]) for name in probes]
        if of_trainer is not None:
            proofs = [
                _compared(proof, probes[proof.engine], engine.kind, weights, of_trainer)
                for proof, engine in zip(proofs, engines, strict=True)
            ]
            _must_be_the_trainers(proofs, weights)
        self._check_probes(probes, weights, before)
        await self._all("resume", engines, lambda engine: engine.resume())
        await self._all("sample", engines, lambda engine: _sample(engine, weights))
        return Published(
            weights,
            tuple(proofs),
            tuple(next(iter(probes.values()))),
            of_trainer,
            tuple(engine.kind for engine in engines),
            self._seconds,
        )

    async def _answer(self, answer: AwaitAnswer, weights: Weights) -> ProbeAnswer:
        seconds = self._deadlines.trainer
        try:
            async with asyncio.timeout(seconds):
                return await answer()
        except TimeoutError:
            raise TrainerSilent(
                f"the trainer did not send its log-probs of version {weights.version}'s probe within {seconds:g} s"
            ) from None

    async def _all(
        self, step: str, engines: Sequence[Engine], action: Callable[[Engine], Awaitable[T]]
    ) -> dict[str, T]:
        seconds = getattr(self._deadlines, step)

        async def one(engine: Engine) -> T:
            with self._at(engine.name, step):
                try:
                    async with asyncio.timeout(seconds):
                        return await action(engine)
                except TimeoutError:
                    raise EngineLost(f"engine {engine.name}: {step} did not finish within {seconds:g} s") from None

        begun = time.monotonic()
        results = await asyncio.gather(*(one(engine) for engine in engines), return_exceptions=True)
        self._seconds[step] = time.monotonic() - begun
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
            raise StepFailed(step, errors)
        return done

    @contextlib.contextmanager
    def _at(self, name: str, step: str) -> Iterator[None]:
        self.current[name] = (step, time.monotonic())
        try:
            yield
        finally:
            del self.current[name]

    def _check_probes(self, probes: Mapping[str, list[float]], weights: Weights, before: Published | None) -> None:
        # An earlier probe of the same weights says which engine is wrong; two engines alone only differ.
        errors = _off_the_known(probes, weights, before, self._probe_tolerance) if before else {}
        if errors := errors or _off_the_middle(probes, weights, self._probe_tolerance):
            raise StepFailed("probe", errors)


def _off_the_known(
    probes: Mapping[str, list[float]], weights: Weights, before: Published, tolerance: float
) -> dict[str, Exception]:
    """Engines whose log-probs are not those of the same version before."""
    if (weights.version, weights.fingerprint) != (before.weights.version, before.weights.fingerprint):
        return {}
    return {
        name: EngineRefused(
            f"engine {name}: its log-probs of the probe are not those of the other engines with the same weights"
        )
        for name, found in probes.items()
        if not all(abs(a - b) <= tolerance for a, b in zip(found, before.probe, strict=True))
    }


def _off_the_middle(probes: Mapping[str, list[float]], weights: Weights, tolerance: float) -> dict[str, Exception]:
    """Engines whose log-probs are not those of most engines."""
    errors: dict[str, Exception] = {}
    middle = [statistics.median(values) for values in zip(*probes.values(), strict=True)]
    for name, found in probes.items():
        differences = [abs(a - b) for a, b in zip(found, middle, strict=True)]
        # Written so that NaN, on either side, never matches.
        if not all(difference <= tolerance for difference in differences):
            errors[name] = EngineRefused(
                f"engine {name}: its log-probs of the probe are {max(differences):g} from those of all engines, beyond "
                f"{tolerance:g}: it does not hold version {weights.version}"
            )
    return errors


def _must_equal(step: str, reports: Mapping[str, WeightReport], wanted: WeightReport) -> None:
    errors: dict[str, Exception] = {
        name: EngineRefused(
            f"engine {name}: {step} reports version {report.version} with fingerprint {report.fingerprint!r}, and "
            f"version {wanted.version} with {wanted.fingerprint!r} was published"
        )
        for name, report in reports.items()
        if report != wanted
    }
    if errors:
        raise StepFailed(step, errors)


def _compared(
    proof: Proof, of_engine: Sequence[float], kind: EngineKind, weights: Weights, of_trainer: ProbeAnswer
) -> Proof:
    if not kind.has_model:
        return proof
    bound = of_trainer.bound
    if bound is None:
        bound = probe.find_bound(kind, of_trainer.dtype, weights.dtype)
    found = probe.measure_difference(of_engine, decode_log_probs(of_trainer.log_probs).tolist())
    return dataclasses.replace(proof, difference=found, bound=bound)


def _must_be_the_trainers(proofs: Sequence[Proof], weights: Weights) -> None:
    errors: dict[str, Exception] = {}
    for proof in proofs:
        # Written so that NaN is not within the bound.
        if proof.difference is not None and proof.bound is not None and not proof.difference.mean <= proof.bound:
            errors[proof.engine] = WrongWeights(
                f"engine {proof.engine}: its log-probs of the probe differ from those that the trainer computes with "
                f"version {weights.version} by {proof.difference.mean:.3g} on average (at most "
                f"{proof.difference.largest:.3g}), beyond {proof.bound:g} (--publish-probe-bound): it does not hold "
                f"version {weights.version}"
            )
    if errors:
        raise StepFailed("probe", errors)


async def _sample(engine: Engine, weights: Weights) -> Any:
    """Sample one token, which must be of the version and the fingerprint that were published."""
    request = GroupRequest(
        request_id=f"ready-{engine.name}-{weights.version}",
        prompt_tokens=(1, 2, 3),
        group_size=1,
        seed=0,
        sampling=Sampling(max_tokens=1),
    )
    (response,) = await engine.generate(request)
    found = ({span.version for span in response.spans}, response.fingerprint)
    if found != ({str(weights.version)}, weights.fingerprint):
        raise EngineRefused(f"engine {engine.name}: its first token after {weights.version} is of {found}")
