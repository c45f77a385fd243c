"""One attempt to bring a version to a set of engines: every engine takes a step before any takes the next.

    pause, load, commit, verify, probe | resume, sample

Up to the bar nothing samples: an engine that fails there leaves all of them paused. Invariants:

- each step has a deadline; what fails is the step, and it names the engines and why;
- the fingerprints that engines digested, and those they are tagged with, are the announced one;
- the parameters of an engine that is given other weights are not what they were. The log-probs of the probe may be:
  in a narrow dtype a small update changes few weights, and those log-probs not at all;
- engines with the same weights give the same log-probs to the same probe.
"""

import asyncio
import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from megatron_rl.errors import MegatronRLError
from megatron_rl.rollout.wire import Sampling, Weights
from megatron_rl.sidecar.engine import Engine, EngineLost, EngineRefused, GroupRequest, WeightReport

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepDeadlines:
    """Seconds that each step may take on every engine."""

    pause: float = 60
    load: float = 600
    commit: float = 60
    verify: float = 60
    probe: float = 120
    resume: float = 60
    sample: float = 120


@dataclasses.dataclass(frozen=True)
class Published:
    """A version as engines hold it."""

    weights: Weights
    reports: tuple[tuple[str, WeightReport], ...]
    probe: tuple[float, ...]


class StepFailed(MegatronRLError):
    """A step of a publish failed on some engines."""

    def __init__(self, step: str, errors: Mapping[str, Exception]) -> None:
        self.step = step
        self.errors = dict(errors)
        super().__init__("; ".join(str(error) or repr(error) for error in self.errors.values()))

    @property
    def lost(self) -> list[str]:
        """The engines that are gone: nothing but a restart helps them."""
        return [name for name, error in self.errors.items() if isinstance(error, EngineLost)]


class Steps:
    """Takes engines through the steps; knows who is at which step since when."""

    def __init__(self, deadlines: StepDeadlines = StepDeadlines(), probe_tolerance: float = 1e-5) -> None:
        self.current: dict[str, tuple[str, float]] = {}
        self._deadlines = deadlines
        self._probe_tolerance = probe_tolerance

    async def publish(self, engines: Sequence[Engine], weights: Weights, before: Published | None) -> Published:
        """All steps; `before` is what engines were last brought to, as far as it is known."""
        wanted = WeightReport(weights.version, weights.fingerprint)
        await self._all("pause", engines, lambda engine: engine.pause())
        reports = await self._all("load", engines, lambda engine: engine.load(weights))
        _must_equal("load", reports, wanted)
        _must_have_changed(reports)
        await self._all("commit", engines, lambda engine: engine.commit(reports[engine.name]))
        tags = await self._all("verify", engines, lambda engine: engine.verify())
        _must_equal("verify", tags, wanted)
        probes = await self._all("probe", engines, lambda engine: engine.probe())
        self._check_probes(probes, weights, before)
        await self._all("resume", engines, lambda engine: engine.resume())
        await self._all("sample", engines, lambda engine: _sample(engine, weights))
        return Published(weights, tuple(tags.items()), tuple(next(iter(probes.values()))))

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

        results = await asyncio.gather(*(one(engine) for engine in engines), return_exceptions=True)
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
        # Which engine is wrong is known for sure where there is something to compare with; two alone only differ.
        errors = _off_the_known(probes, weights, before, self._probe_tolerance) if before else {}
        if errors := errors or _off_the_middle(probes, weights, self._probe_tolerance):
            raise StepFailed("probe", errors)


def _off_the_known(
    probes: Mapping[str, list[float]], weights: Weights, before: Published, tolerance: float
) -> dict[str, Exception]:
    """Engines whose probe is not that of the same weights before."""
    if weights.fingerprint != before.weights.fingerprint:
        if same := ", ".join(name for name, probe in probes.items() if tuple(probe) == before.probe):
            is_as = f"the probe's log-probs are those of version {before.weights.version}, bit for bit"
            _log.warning("version %d: %s, though it is of other weights: %s", weights.version, is_as, same)
        return {}
    return {
        name: EngineRefused(
            f"engine {name}: its log-probs of the probe are not those of the other engines with the same weights"
        )
        for name, probe in probes.items()
        if not all(abs(a - b) <= tolerance for a, b in zip(probe, before.probe, strict=True))
    }


def _off_the_middle(probes: Mapping[str, list[float]], weights: Weights, tolerance: float) -> dict[str, Exception]:
    """Engines whose probe is not that of most of them."""
    errors: dict[str, Exception] = {}
    middle = [statistics.median(values) for values in zip(*probes.values(), strict=True)]
    for name, probe in probes.items():
        differences = [abs(a - b) for a, b in zip(probe, middle, strict=True)]
        # Written so that what is not a number, wherever it stands, is no match.
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


def _must_have_changed(reports: Mapping[str, WeightReport]) -> None:
    errors: dict[str, Exception] = {
        name: EngineRefused(
            f"engine {name} was given version {report.version} and its parameters are what they were before, with "
            "another fingerprint: it kept its old weights"
        )
        for name, report in reports.items()
        if report.is_unchanged
    }
    if errors:
        raise StepFailed("load", errors)


async def _sample(engine: Engine, weights: Weights) -> Any:
    """One token, from the version and the fingerprint that were published."""
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
