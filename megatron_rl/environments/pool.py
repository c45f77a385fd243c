"""The pool of processes that run environments, and the conversations with them.

Invariants:

- a conversation's environment is made for it, in one process, and no other conversation sees it;
- a conversation whose environment fails ends with CallFailed; one whose process ended, with ProcessEnded;
- a process in which a call holds Python's lock ends, so that no other conversation fails for it.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import ConfinedPool, PoolSettings, Program
from megatron_rl.confined.process import CallFailed, ConfinedProcess, TooSlow
from megatron_rl.environments.types import FLAG, Description, parse_source
from megatron_rl.rewards.spec import read_source

Note = Callable[[str], Callable[[], None]]
"""Function that is told the name of a call as it begins; it returns what to do at its end.

The call `place` waits until a worker takes the conversation.
"""


class Conversation:
    def __init__(self, process: ConfinedProcess, number: int, timeout: float, note: Note) -> None:
        self._process = process
        self._number = number
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
        return float(await self.call("reward"))

    async def close(self) -> None:
        """Let a call that was broken off end, and then the environment; one that does not end wears its process."""
        try:
            await self.call("close")
        except CallFailed:
            pass
        except asyncio.CancelledError:
            self._process.is_worn = True
            raise

    async def call(self, call: str, timeout: float | None = None, **content: Any) -> Any:
        end = self._note(call)
        try:
            return await self._process.call(call, timeout or self._timeout, conversation=self._number, **content)
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


class EnvironmentProcess(ConfinedProcess):
    """A process that runs the environments of several conversations."""

    SHARES_LOCK = True


class EnvironmentPool(ConfinedPool):
    MODULE = "megatron_rl.environments.worker"
    PROCESS: type[ConfinedProcess] = EnvironmentProcess
    CONVERSATION = Conversation

    def __init__(
        self,
        config: EnvironmentConfig,
        settings: PoolSettings | None = None,
        flag: str = FLAG,
        **program: Any,
    ) -> None:
        """Make it; `flag` names the class or the function that is run, and `program` are fields of Program."""
        self._file, self._name = parse_source((config.source if flag == FLAG else config.agent) or "", flag)
        self._source = read_source(flag, self._file)
        self._config = config
        self._places = asyncio.Semaphore(config.concurrency)
        self._places_alone = asyncio.Semaphore(config.workers)
        self._numbers = itertools.count(1)
        setup = {"file": str(self._file), "name": self._name, "source": self._source}
        folders, workers_flag = (self._file.parent,), "--rollout-env-workers"
        super().__init__(
            Program(self.MODULE, setup, folders, "environments", self._name, flag, workers_flag, **program),
            settings or PoolSettings(),
            config.workers,
        )

    @property
    def identity(self) -> str:
        """Everything that a pool knows to decide what environments say."""
        digest = hashlib.sha256(self._source.encode()).hexdigest()
        config = self._config
        return json.dumps([str(self._file), self._name, digest, config.max_turns])

    async def start(self) -> Description:
        """Start the processes; raise a UsageError that names the file and line if the class cannot be used."""
        description = await super().start()
        return Description(**{**description, "tools": tuple(description["tools"])})

    @contextlib.asynccontextmanager
    async def hold(
        self, row: Mapping[str, Any], seed: int, is_alone: bool = False, note: Note = lambda call: lambda: None
    ) -> AsyncIterator[Conversation]:
        """Hold a conversation with an environment that is made for a row; `is_alone`, in a process of its own."""
        end_wait = note("place")
        alone = self._places_alone if is_alone else contextlib.nullcontext()
        async with self._places, alone, self.lend(is_alone) as process:
            end_wait()
            conversation = self.CONVERSATION(process, next(self._numbers), self._config.timeout, note)
            is_stuck = False
            try:
                await conversation.open(row, seed)
                yield conversation
            except CallFailed as failure:
                is_stuck = isinstance(failure, TooSlow)
                raise
            finally:
                if not is_stuck:
                    await conversation.close()
