"""The pool of workers that hold environments, and the conversations with them.

Invariants:

- a conversation's environment is made for it, on one worker, and no other conversation sees it;
- a conversation whose environment fails ends with EnvironmentFailed; one whose worker ended, with WorkerEnded;
- a worker in which a call holds Python's lock ends, so that no other conversation fails for it;
- a worker in which a call may outlive its conversation takes no new ones, and ends with its last one;
- no process that an environment started outlives `close`.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.environments.interpreter import Interpreter
from megatron_rl.environments.process import EnvironmentWorker
from megatron_rl.environments.types import Description, EnvironmentFailed, EnvironmentSpec, TooSlow
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.rewards.confinement import build_environment, plan_confinement
from megatron_rl.rewards.process import OutputLog, WorkerFault
from megatron_rl.rewards.types import PoolSettings

_log = logging.getLogger(__name__)

Note = Callable[[str], Callable[[], None]]
"""Function that is told the name of a call as it begins; it returns what to do at its end.

The call `place` waits until a worker takes the conversation.
"""


class Conversation:
    """A conversation with an environment."""

    def __init__(self, worker: EnvironmentWorker, number: int, timeout: float, note: Note) -> None:
        self._worker = worker
        self.number = number
        self._timeout = timeout
        self._note = note
        self.opening: str | None = None
        """The environment's first words."""
        self.turn_rewards: list[float] = []
        """The rewards that it gave for turns; 0 for a turn without one, and empty as long as no turn had one."""
        self._num_steps = 0

    async def open(self, row: Mapping[str, Any], seed: int) -> None:
        self.opening = await self.call("open", row=row, seed=seed)

    async def step(self, completion: str) -> str | None:
        """Return what the environment says to a completion; None once the conversation is over."""
        said = await self.call("step", completion=completion)
        self._num_steps += 1
        if isinstance(said, list):
            said, reward = said
            self.turn_rewards += [0.0] * (self._num_steps - 1 - len(self.turn_rewards)) + [reward]
        return None if said is None else str(said)

    async def use(self, name: str, arguments: str) -> str:
        """Call a tool with arguments in JSON; return its result, or what is wrong with the call."""
        return str(await self.call("tool", name=name, arguments=arguments))

    async def get_reward(self) -> float:
        """Return the reward of the conversation."""
        return float(await self.call("reward"))

    async def close(self) -> None:
        """Let a call that was broken off end, and then the environment; one that does not end wears its worker."""
        try:
            await self.call("close")
        except EnvironmentFailed:
            pass
        except asyncio.CancelledError:
            self._worker.is_worn = True
            raise

    async def call(self, call: str, timeout: float | None = None, **content: Any) -> Any:
        """Make a call of the worker."""
        request = {"call": call, "conversation": self.number, **content}
        end = self._note(call)
        try:
            return await self._worker.call(request, timeout or self._timeout)
        finally:
            end()


def describe_environment(config: EnvironmentConfig, settings: PoolSettings) -> Description:
    """Describe a class of environments, in a process of its own that ends."""

    async def describe() -> Description:
        pool = EnvironmentPool(dataclasses.replace(config, workers=1), settings)
        try:
            return await pool.start()
        finally:
            await pool.close()

    return asyncio.run(describe())


class EnvironmentPool:
    """A pool of workers that hold environments. It belongs to the event loop that it is started in."""

    WORKER = EnvironmentWorker
    CONVERSATION = Conversation

    def __init__(
        self,
        config: EnvironmentConfig,
        settings: PoolSettings | None = None,
        spec: EnvironmentSpec | None = None,
        ports: tuple[int, ...] = (),
        variables: Mapping[str, str] | None = None,
        interpreter: Interpreter | None = None,
    ) -> None:
        """Make it; `spec` names what is run if that is not a class of environments.

        With `ports`, workers may connect to no others; `variables` are added to their environment. They run in this
        process's Python, or in another one.
        """
        self._spec = spec or EnvironmentSpec.parse(config.source or "")
        self._ports = ports
        self._variables = variables or {}
        self._interpreter = interpreter or Interpreter.find_own()
        self._source = self._spec.read()
        self._config = config
        self._settings = settings or PoolSettings()
        self._workers: list[EnvironmentWorker] = []
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(config.concurrency)
        self._places_alone = asyncio.Semaphore(config.workers)
        self._numbers = itertools.count(1)
        self._ending: set[asyncio.Task[None]] = set()
        self._log: OutputLog | None = None
        self._scratch: Path | None = None
        self._description: Description | None = None
        self.missing: dict[str, str] = {}
        """The ways in which workers are not confined, each with the reason."""

    @property
    def identity(self) -> str:
        """Everything that a pool knows to decide what environments say."""
        digest = hashlib.sha256(self._source.encode()).hexdigest()
        config = self._config
        return json.dumps([str(self._spec.file), self._spec.name, digest, config.max_turns, config.on_error])

    async def start(self) -> Description:
        """Start the workers; raise a UsageError that names the file and line if the class cannot be used."""
        self._scratch = Path(tempfile.mkdtemp(prefix="megatron-rl-environments-"))
        self._log = OutputLog(self._settings.log)
        try:
            for _ in range(self._config.workers):
                await self._start_worker()
        except BaseException:
            await self.close()
            raise
        for what, why in self.missing.items():
            _log.warning("environments are not confined in %s: %s", what, why)
        assert self._description is not None
        return self._description

    @contextlib.asynccontextmanager
    async def hold(
        self, row: Mapping[str, Any], seed: int, is_alone: bool = False, note: Note = lambda call: lambda: None
    ) -> AsyncIterator[Conversation]:
        """Hold a conversation with an environment that is made for a row; `is_alone`, on a worker of its own."""
        end_wait = note("place")
        async with self._places, self._places_alone if is_alone else contextlib.nullcontext():
            worker = await (self._start_alone() if is_alone else self._choose())
            end_wait()
            conversation = self.CONVERSATION(worker, next(self._numbers), self._config.timeout, note)
            worker.conversations.add(conversation.number)
            is_stuck = False
            try:
                await conversation.open(row, seed)
                yield conversation
            except EnvironmentFailed as failure:
                is_stuck = isinstance(failure, TooSlow)
                raise
            finally:
                try:
                    if not is_stuck:
                        await conversation.close()
                finally:
                    self._leave(worker, conversation)

    async def close(self) -> None:
        """End all workers."""
        for worker in list(self._workers):
            self._end(worker)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)
        if self._log is not None:
            self._log.close()
        if self._scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    async def _start_alone(self) -> EnvironmentWorker:
        """Start a worker that takes one conversation, and ends after it."""
        await self._start_worker()
        worker = self._workers[-1]
        worker.is_worn = True
        return worker

    async def _choose(self) -> EnvironmentWorker:
        """Return the worker with the fewest conversations; start another one for each that is worn."""
        async with self._starting:
            while len(fresh := [worker for worker in self._workers if not worker.is_worn]) < self._config.workers:
                await self._start_worker()
        return min(fresh, key=lambda worker: len(worker.conversations))

    def _leave(self, worker: EnvironmentWorker, conversation: Conversation) -> None:
        worker.conversations.discard(conversation.number)
        if worker.is_worn and not worker.conversations and worker in self._workers:
            self._end(worker)

    async def _start_worker(self) -> None:
        assert self._scratch is not None and self._log is not None
        path = self._interpreter.path
        environment = {**build_environment(self._settings.environment, self._scratch, path), **self._variables}
        try:
            worker = await self.WORKER.start(environment, self._settings.namespace, self._log, self._interpreter.python)
        except OSError as error:
            raise PlatformError(
                f"a process for environments cannot be started: {error.strerror or error}; make room for it (ulimit "
                "-n, ulimit -u, memory), or lower --rollout-env-workers"
            ) from None
        try:
            answer = await worker.set_up(self._setup_line(path), self._settings.start_timeout)
            if "cannot_load" in answer:
                raise UsageError(f"{self._spec.flag}: {answer['cannot_load']}")
            self._check_confinement(answer["missing"])
        except WorkerFault as fault:
            self._end(worker)
            raise UsageError(f"{self._spec.flag}: a process that loads {self._spec.name} {fault}") from None
        except BaseException:
            self._end(worker)
            raise
        worker.follow()
        self._workers.append(worker)
        if self._description is None:
            found = answer["description"]
            self._description = Description(**{**found, "tools": tuple(found["tools"])})

    def _setup_line(self, path: list[str]) -> bytes:
        assert self._scratch is not None
        read = [self._spec.file.parent, *self._interpreter.readable, *self._settings.readable]
        limits = plan_confinement(read, self._settings.private, self._scratch, path)
        limits = dataclasses.replace(limits, ports=self._ports)
        setup = {
            "file": str(self._spec.file),
            "name": self._spec.name,
            "source": self._source,
            # They take seconds, so the first process alone makes them.
            "has_schemas": self._description is None,
            "memory_bytes": self._settings.memory_bytes,
            "confinement": None if self._settings.confine == "off" else dataclasses.asdict(limits),
        }
        return json.dumps(setup).encode() + b"\n"

    def _check_confinement(self, missing: dict[str, str]) -> None:
        self.missing = missing if self._settings.confine != "off" else {"everything": "--reward-confine is off"}
        if self._settings.confine == "require" and missing:
            what = "; ".join(f"{name} ({why})" for name, why in missing.items())
            raise PlatformError(f"--reward-confine require: environments cannot be confined in {what}; write auto")

    def _end(self, worker: EnvironmentWorker) -> None:
        """End a worker in the background; `close` waits for it."""
        worker.kill()
        if worker in self._workers:
            self._workers.remove(worker)
        task = asyncio.get_running_loop().create_task(worker.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
