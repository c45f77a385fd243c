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
from megatron_rl.rewards import classifier
from megatron_rl.rewards.model_folders import hash_folder, list_places
from megatron_rl.rewards.spec import parse_on_error, read_source
from megatron_rl.rewards.types import RewardError, RewardRequest, RewardResult, RewardSpec, Values, check_values
from megatron_rl.types import MKL_MODE

_LOG_FILE = "rewards.log"
_LOGGER = logging.getLogger(__name__)
# A trial that takes longer is abandoned, without consequences.
_TRIAL_SECONDS = 3.0
# Rewards that are not tried: the requests would cost their servers work for no use.
_REMOTE = ("http",)
# Seconds that the weights of a classifier may take to load.
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


class RewardPart(Protocol):
    """A reward with processes of its own, which scores while functions do."""

    warnings: list[str]

    @property
    def identity(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def try_on(self, trials: Sequence[RewardRequest]) -> None: ...

    async def answer(self, request: RewardRequest, group: bytes) -> FunctionAnswer: ...


class RewardPool(ConfinedPool):
    """A pool of processes that run reward functions, each for one group at a time.

    Groups wait for a process in order. A classifier has a pool of its own.
    """

    _VARIABLES: Mapping[str, str] = {}

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        settings: PoolSettings | None = None,
        parts: Mapping[int, RewardPart] | None = None,
    ) -> None:
        """Make a pool; `parts` are the rewards that others give, by their numbers in `specs`."""
        if not specs:
            raise UsageError("--reward is missing: write --reward FILE.py:FUNCTION or --reward NAME")
        settings = settings or PoolSettings()
        if settings.num_workers < 1:
            raise UsageError(f"--reward-workers {settings.num_workers} must be at least 1")
        self._specs = tuple(_with_full_path(spec) for spec in specs)
        self._parts = {**self._make_classifiers(settings), **(parts or {})}
        self._functions = [number for number in range(len(specs)) if number not in self._parts]
        own = [self._specs[number] for number in self._functions]
        self._sources = {spec.source: read_source("--reward", spec.source) for spec in self._specs if spec.is_file}
        self._places = asyncio.Semaphore(settings.num_workers)
        self.errors: collections.Counter[str] = collections.Counter()
        """The number of groups that each function failed for, including those that got the value of `on_error`."""
        program = Program(
            "megatron_rl.rewards.worker",
            {"specs": [dataclasses.asdict(spec) for spec in own], "sources": self._sources},
            tuple(Path(file).parent for file in self._sources) + self._list_model_places(),
            "reward functions",
            ", ".join(spec.name for spec in own),
            "--reward",
            "--reward-workers",
            variables=self._VARIABLES,
        )
        super().__init__(program, settings, settings.num_workers if own else 0)
        for part in self._parts.values():
            part.warnings = self.warnings

    def _make_classifiers(self, settings: PoolSettings) -> Mapping[int, RewardPart]:
        named = [(number, spec) for number, spec in enumerate(self._specs) if spec.source == classifier.NAME]
        return {number: ClassifierPool(spec, settings) for number, spec in named}

    def _list_model_places(self) -> tuple[Path, ...]:
        return ()

    @property
    def identity(self) -> str:
        """Everything that a pool knows to decide a reward; it does not know what functions import, read or ask for."""
        digests = {file: hashlib.sha256(source.encode()).hexdigest() for file, source in self._sources.items()}
        specs = [dataclasses.asdict(spec) for spec in self._specs]
        known = {"specs": specs, "digests": digests, "on_error": self._settings.on_error}
        parts = [part.identity for part in self._parts.values()]
        return json.dumps({**known, "parts": parts} if parts else known)

    async def start(self) -> None:
        starts = [super().start(), *(part.start() for part in self._parts.values())]
        try:
            async with asyncio.TaskGroup() as tasks:
                for start in starts:
                    tasks.create_task(start)
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None

    async def close(self) -> None:
        """End all processes; calls that wait fail."""
        await asyncio.gather(super().close(), *(part.close() for part in self._parts.values()))

    async def try_on(self, trials: Sequence[RewardRequest]) -> None:
        """Call every function once for each trial, a row with made-up completions, before any group is scored.

        A UsageError names each mistake that any completion would cause, at the first row that has one.
        """
        failed: dict[int, list[str]] = {}
        try:
            for trial in trials if self._functions else ():
                self._check_trial(trial, await self._try_out(trial), failed)
            for part in self._parts.values():
                await part.try_on(trials)
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
                for number in self._functions:
                    if self._specs[number].source not in _REMOTE:
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
        try:
            async with asyncio.TaskGroup() as tasks:
                scoring = tasks.create_task(self._score_in_turn(request, group))
                others = {
                    number: tasks.create_task(part.answer(request, group)) for number, part in self._parts.items()
                }
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        answers = {**dict(zip(self._functions, scoring.result(), strict=True))}
        answers |= {number: task.result() for number, task in others.items()}
        return self._result(request, [answers[number] for number in range(len(self._specs))], begin)

    async def _score_in_turn(self, request: RewardRequest, group: bytes) -> list[FunctionAnswer]:
        async with self._places:
            return await self._score(request, group)

    async def _score(self, request: RewardRequest, group: bytes) -> list[FunctionAnswer]:
        """Return the answers of all functions, or raise at the first failure if that fails the group."""
        answers: list[FunctionAnswer] = []
        is_alone = False
        while len(answers) < len(self._functions):
            spec = self._specs[self._functions[len(answers)]]
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
                self._failed(self._specs[self._functions[len(answers) - 1]].name, request, answers[-1].error)
        return answers

    async def _score_in(
        self, process: ConfinedProcess, request: RewardRequest, group: bytes, answers: list[FunctionAnswer]
    ) -> None:
        """Add the answers of the functions that are left, as long as the process can be used."""
        for number in self._functions[len(answers) :]:
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
        place = self._functions.index(number)
        said = await process.call(call, timeout, {"group": group}, function=place, prompt_index=request.index)
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
        if None in rewards and self._settings.on_error is not None:
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


class ClassifierPool(RewardPool):
    """The process of a classifier, which scores one group at a time."""

    _VARIABLES = MKL_MODE

    def __init__(self, spec: RewardSpec, settings: PoolSettings) -> None:
        confine = settings.confine if spec.device == "cpu" else "off"
        own = dataclasses.replace(
            settings, num_workers=1, memory_bytes=None, start_timeout=_LOAD_SECONDS, confine=confine
        )
        super().__init__([spec], own)

    def _make_classifiers(self, settings: PoolSettings) -> Mapping[int, RewardPart]:
        return {}

    def _list_model_places(self) -> tuple[Path, ...]:
        return list_places(self._folder)

    @property
    def _folder(self) -> Path:
        return Path(classifier.split_label(str(self._specs[0].argument))[0])

    @property
    def identity(self) -> str:
        return f"{super().identity} {hash_folder(self._folder)}"

    async def try_on(self, trials: Sequence[RewardRequest]) -> None:
        """Score the first row with made-up completions; a UsageError says what any row of its kind would cause."""
        for trial in trials[:1]:
            try:
                answer = await self.answer(trial, trial.encode())
            except RewardError as error:
                raise UsageError(f"the trial of a reward: {error}") from None
            if answer.values is None:
                self._warn(f"--reward {self._specs[0].name} failed in its trial: {answer.error}")

    async def answer(self, request: RewardRequest, group: bytes) -> FunctionAnswer:
        (answer,) = await self._score_in_turn(request, group)
        return answer


def _with_full_path(spec: RewardSpec) -> RewardSpec:
    """Return a function's file, or a classifier's folder, by a path that counts in other working directories too."""
    if spec.source == classifier.NAME and spec.argument:
        return dataclasses.replace(spec, argument=os.path.abspath(spec.argument))
    return dataclasses.replace(spec, source=os.path.realpath(spec.source)) if spec.is_file else spec
