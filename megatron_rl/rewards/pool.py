"""The pool of workers that scores groups while others are still being generated.

Invariants:

- each function scores every group exactly once, on a worker without an earlier failure, or the group fails with a
  RewardError that names function and prompt;
- a worker is never used again after a failure, and a group's failure affects no other group;
- no process that a function started outlives `close`.
"""

import asyncio
import collections
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import MegatronRLError, PlatformError, UsageError
from megatron_rl.rewards.confinement import build_environment, find_python_path, plan_confinement
from megatron_rl.rewards.process import FunctionAnswer, OutputLog, RewardWorker, WorkerFault
from megatron_rl.rewards.spec import read_source
from megatron_rl.rewards.types import PoolSettings, RewardError, RewardRequest, RewardResult, RewardSpec

_LOGGER = logging.getLogger(__name__)
# A trial that takes longer is abandoned, without consequences.
_TRIAL_SECONDS = 3.0
# Rewards that are not tried: the requests would cost their servers work for no use.
_REMOTE = ("http",)


class RewardPool:
    """A pool of worker processes that run reward functions. It belongs to the event loop that it is started in.

    Groups wait for a worker in order, and are encoded only once they have one.
    """

    def __init__(self, specs: Sequence[RewardSpec], settings: PoolSettings | None = None) -> None:
        if not specs:
            raise UsageError("--reward is missing: write --reward FILE.py:FUNCTION or --reward NAME")
        self._specs = tuple(_with_full_path(spec) for spec in specs)
        self._settings = settings or PoolSettings()
        if self._settings.num_workers < 1:
            raise UsageError(f"--reward-workers {self._settings.num_workers} must be at least 1")
        self._free: asyncio.Queue[RewardWorker | None] = asyncio.Queue()
        self._alive: set[RewardWorker] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._num_jobs = 0
        self._started = self._closed = self._is_read = False
        self._sources: dict[str, str] = {}
        self.errors: collections.Counter[str] = collections.Counter()
        """The number of groups that each function failed for, including those that got the value of `on_error`."""
        self.missing: dict[str, str] = {}
        """The ways in which workers are not confined, each with the reason."""
        self.warnings: list[str] = []
        """Warnings for the user before groups are scored."""

    def read_sources(self) -> None:
        """Read the files of functions, which decide `identity`; `start` does it too, if it has not been done."""
        self._sources = {spec.source: read_source(spec.source) for spec in self._specs if spec.is_file}
        self._is_read = True

    async def start(self) -> None:
        """Load every function in every worker; raise a UsageError that names the file and line that does not import."""
        assert not self._started, "a pool is started once"
        self._started = True
        self._scratch = Path(tempfile.mkdtemp(prefix="megatron-rl-rewards-"))
        try:
            self._log = OutputLog(self._settings.log)
            if not self._is_read:
                self.read_sources()
            path = find_python_path()
            self._environment = build_environment(self._settings.environment, self._scratch, path)
            self._setup = self._setup_line(path)
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._start_worker()) for _ in range(self._settings.num_workers)]
            for start in starts:
                self._free.put_nowait(start.result())
        except BaseExceptionGroup as errors:
            await self.close()
            raise errors.exceptions[0] from None
        except BaseException:
            await self.close()
            raise
        for what, why in self.missing.items():
            self._warn(f"functions are not confined in {what}: {why}")

    async def try_on(self, trials: Sequence[RewardRequest]) -> None:
        """Call every function once for each trial, a row with made-up completions, before any group is scored.

        A UsageError names each mistake that any completion would cause, at the first row that has one.
        """
        assert self._started, "functions are tried after start"
        failed: dict[int, list[str]] = {}
        worker = await self._free.get()
        try:
            for trial in trials:
                if worker is not None:
                    worker = await self._try_out(worker, trial, failed)
        except BaseException:
            await self.close()
            raise
        self._free.put_nowait(worker)
        self._warn_of_failures(failed, trials)

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        _LOGGER.warning("%s", warning)

    def _setup_line(self, path: list[str]) -> bytes:
        read = [*(Path(file).parent for file in self._sources), *self._settings.readable]
        limits = plan_confinement(read, self._settings.private, self._scratch, path)
        setup = {
            "specs": [dataclasses.asdict(spec) for spec in self._specs],
            "sources": self._sources,
            "memory_bytes": self._settings.memory_bytes,
            "confinement": None if self._settings.confine == "off" else dataclasses.asdict(limits),
        }
        return json.dumps(setup).encode() + b"\n"

    @property
    def identity(self) -> str:
        """Everything that a pool knows to decide a reward; it does not know what functions import, read or ask for."""
        assert self._is_read, "read_sources comes before"
        digests = {file: hashlib.sha256(source.encode()).hexdigest() for file, source in self._sources.items()}
        specs = [dataclasses.asdict(spec) for spec in self._specs]
        return json.dumps({"specs": specs, "digests": digests, "on_error": self._settings.on_error})

    async def _start_worker(self) -> RewardWorker:
        try:
            worker = await RewardWorker.start(self._environment, self._settings.namespace, self._log)
        except OSError as error:
            raise PlatformError(
                f"a process for reward functions cannot be started: {error.strerror or error}; make room for it "
                f"(ulimit -n, ulimit -u, memory), or lower --reward-workers"
            ) from None
        if self._closed:
            await worker.end()
            raise MegatronRLError("the run is ending")
        self._alive.add(worker)
        try:
            answer = await worker.set_up(self._setup, self._settings.start_timeout)
            if "cannot_load" in answer:
                raise UsageError(f"--reward: {answer['cannot_load']}")
            self._check_confinement(answer.get("missing", {}))
        except WorkerFault as fault:
            self._end(worker)
            raise UsageError(f"--reward: a worker that loads {self._names()} {fault}") from None
        except BaseException:
            self._end(worker)
            raise
        return worker

    async def _try_out(
        self, worker: RewardWorker, request: RewardRequest, failed: dict[int, list[str]]
    ) -> RewardWorker | None:
        """Call every function once; return the worker, which keeps no state of it, or None if a fresh one is needed.

        `failed` collects, by the number of the function, the failures that other completions may not cause.
        """
        functions = [number for number, spec in enumerate(self._specs) if spec.source not in _REMOTE]
        job = {"job": 0, "functions": functions, "prompt_index": request.index, "stop": False, "trial": True}
        answers: dict[int, FunctionAnswer] = {}
        try:
            answers = await worker.try_out(job, request.encode(), len(request.completions), _TRIAL_SECONDS)
        except WorkerFault as fault:
            # A real completion may not cause this. If one does, the group's failure will report it.
            _LOGGER.info("a trial of the rewards with made-up completions: %s", fault)
            self._end(worker)
            return None
        problems = []
        row = f"{request.row}: " if request.row else ""
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
        return worker

    def _warn_of_failures(self, failed: dict[int, list[str]], trials: Sequence[RewardRequest]) -> None:
        """Warn of functions that failed in every trial."""
        for number, errors in failed.items():
            if len(errors) == len(trials):
                made_up = ", ".join(map(repr, trials[0].completions))
                name = self._specs[number].name
                self._warn(
                    f"--reward {name} failed in its trial, on all rows that were tried ({len(trials)}): {errors[0]}; "
                    f"check that it works for other completions than {made_up}"
                )

    def _check_confinement(self, missing: dict[str, str]) -> None:
        self.missing = missing
        if self._settings.confine == "off":
            self.missing = {"everything": "--reward-confine is off"} | missing
        elif self._settings.confine == "require" and missing:
            what = "; ".join(f"{name} ({why})" for name, why in missing.items())
            raise PlatformError(f"--reward-confine require: reward functions cannot be confined in {what}; write auto")

    def _names(self) -> str:
        return ", ".join(spec.name for spec in self._specs)

    async def score(self, request: RewardRequest) -> RewardResult:
        """Score a group; raise RewardError if a function fails for it and `on_error` has no value."""
        assert self._started, "score comes after start"
        begin = time.monotonic()
        line = request.encode()
        worker = await self._free.get()
        scoring = _Scoring(self, request, line, worker)
        try:
            answers = await scoring.run()
        except RewardError:
            raise
        except BaseException:
            scoring.discard()
            raise
        finally:
            self._free.put_nowait(scoring.worker)
        return self._result(request, answers, begin)

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
        if None in rewards:
            name, reason = self._names(), f"no function applies to completion {rewards.index(None)}"
            value = self._failed(name, request, reason)
            errors[name] = reason
            rewards = [value if reward is None else reward for reward in rewards]
        return RewardResult([float(reward or 0.0) for reward in rewards], components, time.monotonic() - begin, errors)

    def _failed(self, function: str, request: RewardRequest, reason: str, has_remedy: bool = False) -> float:
        """Count a failure; return the reward that replaces the function's, or raise."""
        self.errors[function] += 1
        if self._settings.on_error is None:
            raise RewardError(function, request, reason, is_at_fault=not has_remedy)
        return self._settings.on_error

    def _end(self, worker: RewardWorker) -> None:
        """End a worker in the background; `close` waits for it."""
        worker.kill()
        self._alive.discard(worker)
        task = asyncio.get_running_loop().create_task(worker.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all workers; groups that wait or are being scored fail."""
        self._closed = True
        for worker in list(self._alive):
            self._end(worker)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)
        if self._started:
            if hasattr(self, "_log"):
                self._log.close()
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)


class _Scoring:
    """The scoring of a group by all functions: on one worker, and on fresh ones after failures."""

    def __init__(self, pool: RewardPool, request: RewardRequest, line: bytes, worker: RewardWorker | None) -> None:
        self.worker = worker
        self._pool = pool
        self._request = request
        self._line = line
        self._retried = False
        self._answers: list[FunctionAnswer] = []

    async def run(self) -> list[FunctionAnswer]:
        """Return the answers of all functions, or up to the first failure if that fails the group."""
        while len(self._answers) < len(self._pool._specs):
            try:
                self._check_open()
                await self._run_on_worker()
            except WorkerFault as fault:
                self.discard()
                self._check_open()
                if fault.is_cause_unclear and not self._retried:
                    self._retried = True
                else:
                    self._answers.append(FunctionAnswer(None, str(fault)))
            if self._answers and self._answers[-1].values is None and self._stops:
                spec = self._pool._specs[len(self._answers) - 1]
                self._pool._failed(spec.name, self._request, self._answers[-1].error)
        return self._answers

    def _check_open(self) -> None:
        if self._pool._closed:
            raise RewardError(self._current.name, self._request, "the run is ending", is_at_fault=False)

    @property
    def _stops(self) -> bool:
        return self._pool._settings.on_error is None

    @property
    def _current(self) -> RewardSpec:
        return self._pool._specs[len(self._answers)]

    async def _run_on_worker(self) -> None:
        if self.worker is not None and not self.worker.is_alive:
            self.discard()
        if self.worker is None:
            self.worker = await self._fresh_worker()
        self._pool._num_jobs += 1
        job, first = self._pool._num_jobs, len(self._answers)
        functions = list(range(first, len(self._pool._specs)))
        what = {"job": job, "functions": functions, "prompt_index": self._request.index, "stop": self._stops}
        await self.worker.send(what, self._line, self._current.timeout)
        for function in functions:
            timeout = self._current.timeout
            answer = await self.worker.answer(job, function, len(self._request.completions), timeout)
            self._answers.append(answer)
            if answer.values is None and self._stops:
                break
        self.worker.served()

    async def _fresh_worker(self) -> RewardWorker:
        try:
            return await self._pool._start_worker()
        except MegatronRLError as error:
            raise RewardError(self._current.name, self._request, str(error), is_at_fault=False) from None

    def discard(self) -> None:
        """End the worker: its state is unknown."""
        if self.worker is not None:
            self._pool._end(self.worker)
            self.worker = None


def _with_full_path(spec: RewardSpec) -> RewardSpec:
    return dataclasses.replace(spec, source=os.path.realpath(spec.source)) if spec.is_file else spec
