"""Agents that are user-defined functions: each rollout is a process, forked from a confined worker."""

import math
import os
from collections.abc import Mapping
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import Interpreter, PoolSettings
from megatron_rl.confined.process import ConfinedProcess, ProcessEnded, TooSlow
from megatron_rl.confined.worker import find_parent
from megatron_rl.environments.pool import Conversation, EnvironmentPool, Note
from megatron_rl.environments.types import AGENT_FLAG, AGENT_PYTHON_FLAG
from megatron_rl.gateway.gateway import PROCESS_KEY
from megatron_rl.gateway.processes import end_strays, end_tree, find_unknown, list_children
from megatron_rl.gateway.rollout_context import RolloutContext
from megatron_rl.gateway.worker import build_variables


class AgentProcess(ConfinedProcess):
    """A process that forks another one for each rollout."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._pid = 0
        # The processes of rollouts, and those that the agent's file started when it was imported.
        self._known: set[int] = set()

    async def set_up(self, setup: bytes, timeout: float) -> dict[str, Any]:
        answer = await super().set_up(setup, timeout)
        # The keeper has one child.
        self._pid = next(iter(list_children(self._process.pid)), 0)
        self._known.update(list_children(self._pid))
        return {**answer, "missing": answer.get("missing", {}) | find_unknown()}

    async def call(self, call: str, timeout: float, encoded: Mapping[str, bytes] | None = None, **content: Any) -> Any:
        try:
            return await super().call(call, timeout, encoded, **content)
        except TooSlow as slow:
            # The function runs in processes of its own, so it is the worker that is stuck, with all its rollouts.
            self.break_off(str(slow))
            raise ProcessEnded(str(slow), had_call=True) from None

    def note_process(self, pid: int) -> None:
        self._known.add(pid)

    def end_process(self, pid: int) -> None:
        # The number of a process that the worker has reaped may be another one's.
        if find_parent(pid) == self._pid:
            end_tree(pid)
        self._known.discard(pid)
        end_strays(self._pid, self._known)


class AgentConversation(Conversation):
    """A rollout: the conversation is with a process of its own."""

    _process: AgentProcess

    def __init__(self, process: ConfinedProcess, number: int, timeout: float, note: Note) -> None:
        # The limit for calls of environments is not an agent's; the worker is slow to fork on a busy host alone.
        super().__init__(process, number, PoolSettings.start_timeout, note)
        self.process: int | None = None

    async def open(self, row: Mapping[str, Any], seed: int) -> None:
        self.process = int(await self.call("open", row=row, seed=seed))
        self._process.note_process(self.process)

    async def close(self) -> None:
        """End the rollout's process, and every one that it started."""
        if self.process is not None and self._process.is_alive:
            self._process.end_process(self.process)
        await super().close()


class AgentPool(EnvironmentPool):
    """A pool of processes that run agents. Satisfies `megatron_rl.gateway.rollout_context.Agents`."""

    MODULE = "megatron_rl.gateway.worker"
    PROCESS = AgentProcess
    CONVERSATION = AgentConversation

    def __init__(self, config: EnvironmentConfig, settings: PoolSettings, port: int, address: str) -> None:
        """Make it; `port` and `address` are the gateway's."""
        variables, interpreter = build_variables(address, PROCESS_KEY), Interpreter()
        if config.agent_python is not None:
            interpreter = Interpreter.ask(config.agent_python, AGENT_PYTHON_FLAG)
            # The programs of its environment are found, as if it were activated.
            variables["PATH"] = os.pathsep.join(
                [str(config.agent_python.absolute().parent), os.environ.get("PATH", "")]
            )
        super().__init__(
            config,
            settings,
            AGENT_FLAG,
            ports=(port,) if config.agent_network == "gateway" else (),
            variables=variables,
            interpreter=interpreter,
        )

    @property
    def identity(self) -> str:
        python = self._config.agent_python
        return super().identity if python is None else f"{super().identity} in {python}"

    async def act(self, context: RolloutContext) -> Mapping[str, float]:
        timeout = self._config.agent_timeout
        address = {"base_url": context.address, "api_key": context.key, "model": context.model}
        try:
            async with self.hold(context.row, context.seed) as conversation:
                assert isinstance(conversation, AgentConversation) and conversation.process is not None
                context.run_in(conversation.process)
                async with context.clock.limit(timeout):
                    rewards: dict[str, float] = await conversation.call("act", math.inf, **address)
                return rewards
        except TimeoutError:
            raise TooSlow(f"used more than {timeout:g} seconds of its own") from None
