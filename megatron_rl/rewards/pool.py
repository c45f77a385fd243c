"""The pool that scores groups while others are still being generated.

Invariants:

- each function scores every group exactly once, in a process without an earlier failure, or the group fails with a
  RewardError that names function and prompt;
- a process is never used again after a failure, and a group's failure affects no other group;
- no process that a function started outlives `close`.
"""

import asyncio
import collections
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_rl.config.settings import RewardConfig
from megatron_rl.confined.pool import ConfinedPool, PoolSettings, Program
from megatron_rl.confined.process import CallFailed, ConfinedProcess, ProcessEnded, TooSlow
from megatron_rl.errors import MegatronRLError, UsageError
from megatron_rl.rewards.model_folders import CLASSIFIER, hash_folder, list_places
from megatron_rl.rewards.spec import parse_on_error, read_source
from megatron_rl.rewards.types import RewardError, RewardRequest, RewardResult, RewardSpec, Values, check_values
from megatron_rl.types import MKL_MODE

_LOG_FILE = "rewards.log"
_LOGGER = logging.getLogger(__name__)
# A trial that takes longer is abandoned, without consequences.
_TRIAL_SECONDS = 3.0
# Rewards that are not tried: a server would work for no use, and a loaded model cannot be forked.
_REMOTE = ("http", CLASSIFIER)
# The prefixes of variables that choose devices, and with which the toolkits of accelerators find their parts.
_DEVICE_VARIABLES = ("CUDA_", "ASCEND_", "ATB_HOME_PATH")
# Seconds that a classifier may take to load.
_LOAD_SECONDS = 1800.0


def build_pool_settings(reward: RewardConfig, folder: Path, secrets: Iterable[Path] = ()) -> PoolSettings:
    """Build the settings of the processes that run the user's code, which sees neither the run's folder nor secrets."""
    return PoolSettings(
        num_workers=reward.workers,
        on_error=parse_on_error(reward.on_error),
        confine=reward.confine,
        private=(folder.resolve(), *secrets),
        readable=tuple(path.resolve() for path in reward.readable or ()),
        environment=tuple(reward.environment or ()),
        memory_bytes=None if reward.memory_gib is None else int(reward.memory_gib * 2**30),
        log=folder / _LOG_FILE,
    )


@dataclasses.dataclass(frozen=True)
class FunctionAnswer:
    """A function's values for a group, or the reason why it has none."""

    values: Values | None
    error: str = ""
    is_misfit: bool = False
    """Whether any completion would cause this error."""
    has_remedy: bool = False
    """Whether the error says what to do."""


class RewardPool(ConfinedPool):
    """A pool of processes that run reward functions, each for one group at a time.

    Groups wait for a process in order.
    """

    def __init__(
        self, specs: Sequence[RewardSpec], settings: PoolSettings | None = None, is_alone: bool = True
    ) -> None:
        """Make a pool; `is_alone` if no other kind of reward scores the same groups."""
        if not specs:
            raise UsageError("--reward is missing: write --reward FILE.py:FUNCTION or --reward NAME")
        settings = settings or PoolSettings()
        if settings.num_workers < 1:
            raise UsageError(f"--reward-workers {settings.num_workers} must be at least 1")
        self._specs = tuple(_with_full_path(spec) for spec in specs)
        self._is_alone = is_alone
        self._models = [Path(str(spec.argument)) for spec in self._specs if spec.source == CLASSIFIER]
        self._sources = {spec.source: read_source("--reward", spec.source) for spec in self._specs if spec.is_file}
        self._places = asyncio.Semaphore(settings.num_workers)
        self.errors: collections.Counter[str] = collections.Counter()
        """The number of groups that each function failed for, including those that got the value of `on_error`."""
        program = Program(
            "megatron_rl.rewards.worker",
            {"specs": [dataclasses.asdict(spec) for spec in self._specs], "sources": self._sources},
            (
                *(Path(file).parent for file in self._sources),
                *(place for folder in self._models for place in list_places(folder)),
            ),
            "reward functions",
            ", ".join(spec.name for spec in self._specs),
            "--reward",
            "--reward-workers",
            variables=_list_variables(self._specs),
        )
        super().__init__(program, settings, settings.num_workers)

    @property
    def identity(self) -> str:
        """Everything that a pool knows to decide a reward; it does not know what functions import, read or ask for."""
        digests = {file: hashlib.sha256(source.encode()).hexdigest() for file, source in self._sources.items()}
        digests |= {str(folder): hash_folder(folder) for folder in self._models}
        specs = [dataclasses.asdict(spec) for spec in self._specs]
        return json.dumps({"specs": specs, "digests": digests, "on_error": self._settings.on_error})

    async def try_on(self, trials: Sequence[RewardRequest]) -> None:
        """Call every function once for each trial, a row with made-up completions, before any group is scored.

        A UsageError names each mistake that any completion would cause, at the first row that has one.
        """
        failed: dict[int, list[str]] = {}
        try:
            for trial in trials:
                self._check_trial(trial, await self._try_out(trial), failed)
        except BaseException:
            await self.close()
            raise
        for number, errors in failed.items():
            if len(errors) == len(trials):
                made_up = ", ".join(map(repr, trials[0].completions))
                self._warn(
                    f"--reward {self._specs[number].name} failed in its trial, on all rows that were tried "
                    f"({len(trials)}): {errors[0]}; check that it works for other completions than {made_up}"
                )

    async def _try_out(self, trial: RewardRequest) -> dict[int, FunctionAnswer]:
        """Return functions' answers to a made-up group, by number; a function that ends the trial gives none."""
        answers: dict[int, FunctionAnswer] = {}
        loop = asyncio.get_running_loop()
        end, group = loop.time() + _TRIAL_SECONDS, trial.encode()
        async with self._places, self.lend() as process:
            try:
                for number, spec in enumerate(self._specs):
                    if spec.source not in _REMOTE:
                        answer = await self._call(process, "try", number, trial, group, end - loop.time())
                        if answer is not None:
                            answers[number] = answer
            except CallFailed as failure:
                # A real completion may not cause this. If one does, the group's failure will report it.
                _LOGGER.info("a trial of the rewards with made-up completions: %s", failure)
        return answers

    def _check_trial(
        self, trial: RewardRequest, answers: Mapping[int, FunctionAnswer], failed: dict[int, list[str]]
    ) -> None:
        """Raise a UsageError with the mistakes; add to `failed` the failures that other completions may not cause."""
        problems = []
        row = f"{trial.row}: " if trial.row else ""
        for number, answer in answers.items():
            if answer.is_misfit:
                remedy = "" if answer.has_remedy else "; correct the function"
                problems.append(f"--reward {self._specs[number].name}: {row}{answer.error}{remedy}")
            elif answer.values is None:
                failed.setdefault(number, []).append(answer.error)
        if problems and self._settings.on_error is None:
            raise UsageError(*problems)
        for problem in problems:
            self._warn(f"{problem}; until then --reward-on-error replaces its value")

    async def score(self, request: RewardRequest) -> RewardResult:
        """Score a group; raise RewardError if a function fails for it and `on_error` has no value."""
        begin = time.monotonic()
        group = request.encode()
        async with self._places:
            answers = await self._score(request, group)
        return self._result(request, answers, begin)

    async def _score(self, request: RewardRequest, group: bytes) -> list[FunctionAnswer]:
        """Return the answers of all functions, or raise at the first failure if that fails the group."""
        answers: list[FunctionAnswer] = []
        is_alone = False
        while (number := len(answers)) < len(self._specs):
            spec = self._specs[number]
            try:
                async with self.lend(is_alone) as process:
                    await self._score_in(process, request, group, answers)
            except ProcessEnded as ended:
                if self._is_closed:
                    raise RewardError(spec.name, request, "the run is ending", is_at_fault=False) from None
                # What an earlier group left in the process may be the cause.
                is_alone = not process.is_fresh
                if not is_alone:
                    answers.append(FunctionAnswer(None, str(ended)))
            except MegatronRLError as error:
                raise RewardError(spec.name, request, str(error), is_at_fault=False) from None
            if self._stops(answers):
                self._failed(self._specs[len(answers) - 1].name, request, answers[-1].error)
        return answers

    async def _score_in(
        self, process: ConfinedProcess, request: RewardRequest, group: bytes, answers: list[FunctionAnswer]
    ) -> None:
        """Add the answers of the functions that are left, as long as the process can be used."""
        for number in range(len(answers), len(self._specs)):
            timeout = self._specs[number].timeout
            try:
                answer = await self._call(process, "score", number, request, group, timeout)
            except TooSlow:
                answers.append(FunctionAnswer(None, f"did not end within {timeout:g} seconds"))
                break
            except asyncio.CancelledError:
                # The function runs on.
                process.is_worn = True
                raise
            assert answer is not None
            answers.append(answer)
            if self._stops(answers):
                break
        process.is_fresh = False

    def _stops(self, answers: Sequence[FunctionAnswer]) -> bool:
        return bool(answers) and answers[-1].values is None and self._settings.on_error is None

    async def _call(
        self, process: ConfinedProcess, call: str, number: int, request: RewardRequest, group: bytes, timeout: float
    ) -> FunctionAnswer | None:
        said = await process.call(call, timeout, {"group": group}, function=number, prompt_index=request.index)
        if said is None and call == "try":
            return None
        try:
            if "error" in said:
                return FunctionAnswer(None, str(said["error"]), said["misfit"] is True, said["remedy"] is True)
            return FunctionAnswer(check_values(said["values"], len(request.completions)))
        except (ValueError, TypeError, KeyError):
            raise process.report_nonsense() from None

    def _result(self, request: RewardRequest, answers: list[FunctionAnswer], begin: float) -> RewardResult:
        components, errors = {}, {}
        rewards: list[float | None] = [None] * len(request.completions)
        for spec, answer in zip(self._specs, answers, strict=True):
            values = answer.values
            if values is None:
                errors[spec.name] = answer.error
                values = [self._failed(spec.name, request, answer.error)] * len(rewards)
            components[spec.name] = values
            rewards = [
                reward if value is None else (reward or 0.0) + spec.weight * value
                for reward, value in zip(rewards, values, strict=True)
            ]
        if None in rewards and self._settings.on_error is not None and self._is_alone:
            name, reason = self._program.names, f"no function applies to completion {rewards.index(None)}"
            value = self._failed(name, request, reason)
            errors[name] = reason
            rewards = [value if reward is None else reward for reward in rewards]
        return RewardResult(rewards, components, time.monotonic() - begin, errors)

    def _failed(self, function: str, request: RewardRequest, reason: str) -> float:
        """Count a failure; return the reward that replaces the function's, or raise."""
        self.errors[function] += 1
        if self._settings.on_error is None:
            raise RewardError(function, request, reason)
        return self._settings.on_error


class RewardKind(Protocol):
    """A pool of functions, a classifier or a judge, which scores groups."""

    warnings: list[str]

    @property
    def identity(self) -> str: ...

    async def start(self) -> object: ...

    async def close(self) -> None: ...

    async def try_on(self, trials: Sequence[RewardRequest]) -> None: ...

    async def score(self, request: RewardRequest) -> RewardResult: ...


class Rewards:
    """Kinds of rewards that score a group at the same time; their rewards are added in order."""

    def __init__(self, kinds: Sequence[RewardKind]) -> None:
        self.warnings: list[str] = []
        self._kinds = kinds
        for kind in kinds:
            kind.warnings = self.warnings

    @property
    def identity(self) -> str:
        return " ".join(kind.identity for kind in self._kinds)

    async def start(self) -> None:
        await asyncio.gather(*(kind.start() for kind in self._kinds))

    async def close(self) -> None:
        await asyncio.gather(*(kind.close() for kind in self._kinds))

    async def try_on(self, trials: Sequence[RewardRequest]) -> None:
        for kind in self._kinds:
            await kind.try_on(trials)

    async def score(self, request: RewardRequest) -> RewardResult:
        """Score a group; raise the first RewardError."""
        results = await asyncio.gather(*(kind.score(request) for kind in self._kinds))
        return RewardResult(
            [_add(rewards) for rewards in zip(*(result.rewards for result in results), strict=True)],
            {name: values for result in results for name, values in result.components.items()},
            max(result.seconds for result in results),
            {name: reason for result in results for name, reason in result.errors.items()},
        )


def _add(rewards: Iterable[float | None]) -> float | None:
    """Add up rewards without those that do not apply; None if none applies."""
    known = [reward for reward in rewards if reward is not None]
    return sum(known) if known else None


def make_classifier_pool(spec: RewardSpec, settings: PoolSettings, device: str, is_alone: bool) -> RewardPool:
    """Make the one process of a classifier. The devices of accelerators are not confined, unless they must be."""
    confine = "off" if device != "cpu" and settings.confine == "auto" else settings.confine
    own = dataclasses.replace(settings, num_workers=1, memory_bytes=None, start_timeout=_LOAD_SECONDS, confine=confine)
    return RewardPool([dataclasses.replace(spec, device=device)], own, is_alone)


def _list_variables(specs: Sequence[RewardSpec]) -> dict[str, str]:
    """List the variables of a classifier's process, which on an accelerator sees the same devices as this one."""
    models = [spec for spec in specs if spec.source == CLASSIFIER]
    kept = {name: text for name, text in os.environ.items() if name.startswith(_DEVICE_VARIABLES)}
    return (MKL_MODE if models else {}) | (kept if any(spec.device != "cpu" for spec in models) else {})


def _with_full_path(spec: RewardSpec) -> RewardSpec:
    if spec.source == CLASSIFIER and spec.argument:
        return dataclasses.replace(spec, argument=os.path.realpath(spec.argument))
    return dataclasses.replace(spec, source=os.path.realpath(spec.source)) if spec.is_file else spec
