"""Responses of several turns that user-defined code makes with the policy, here a class of environments.

An optional part of a sidecar, from the start of the code's processes to the groups that the service hands out.
"""

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.settings import EnvironmentConfig, RewardConfig, RolloutConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.environments import pool as environment_pool
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.environments.types import Description, parse_env_on_error
from megatron_rl.errors import UsageError
from megatron_rl.gateway.chats import NumberChats, NumberReader, TemplateChats
from megatron_rl.gateway.rollout_context import Agents
from megatron_rl.observe.trace import Recorder
from megatron_rl.rewards.pool import build_pool_settings
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar import starting
from megatron_rl.sidecar.conversations import Conversations, EnvironmentClock
from megatron_rl.sidecar.group_maker import GroupHolder, Samplers
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.vllm.reader import TOOL_FLAG, Parsers, VllmReader, suggest_parser
from megatron_rl.tool_calls import PlainReader, Reader

_LOG_FILE = "parsers.log"


class UserRollouts:
    """User-defined code that makes responses: its processes, and vLLM's parsers of the policy's turns."""

    def __init__(self, settings: SidecarSettings, code: EnvironmentPool | Agents, logs: Path) -> None:
        self.settings = settings
        self.on_error = parse_env_on_error(settings.environment.on_error)
        self.parsers = _build_parsers(settings.rollout, settings.hf_model, logs)
        self.chats: TemplateChats | NumberChats
        self._code = code
        self._offered: Any = None

    @property
    def identity(self) -> str:
        """Name all that decides what they make: groups that others made are made again."""
        rollout, environment = self.settings.rollout, self.settings.environment
        advises = "advises" if environment.gateway_advises else None
        parts = (self._code.identity, rollout.tool_parser, rollout.reasoning_parser, environment.on_error, advises)
        return " ".join(filter(None, parts))

    def list_starts(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """List the parts of the sidecar's start that start them."""
        starts: dict[str, Coroutine[Any, Any, Any]] = {starting.ENVIRONMENTS: self.start()}
        if self.parsers is not None:
            starts[starting.PARSERS] = self.parsers.start()
        return starts

    async def start(self) -> None:
        """Start the code; raise a UsageError if the run cannot use what it offers."""
        build = asyncio.to_thread(build_chats, self.settings)
        self._offered, self.chats = await asyncio.gather(self._code.start(), build)

    async def open(self, engines: Samplers, recorder: Recorder, stack: contextlib.AsyncExitStack) -> GroupHolder:
        """Open, until the stack ends, what makes groups. Everything has started."""
        raise NotImplementedError

    def count(self) -> Mapping[str, Any]:
        """Return the counters that the service's status shows."""
        return {}

    async def close(self) -> None:
        if self.parsers is not None:
            await self.parsers.close()
        await self._code.close()


class EnvironmentRollouts(UserRollouts):
    def __init__(self, settings: SidecarSettings, processes: PoolSettings, logs: Path) -> None:
        self._pool = EnvironmentPool(settings.environment, processes)
        super().__init__(settings, self._pool, logs)
        self._offered: Description

    async def start(self) -> None:
        await super().start()
        check_offered(self._offered, self.settings)

    async def open(self, engines: Samplers, recorder: Recorder, stack: contextlib.AsyncExitStack) -> GroupHolder:
        self.chats.offer(self._offered.tools)
        return Conversations(
            engines,
            self._pool,
            self.chats,
            self.on_error,
            self._offered,
            choose_reader(self.chats, self._offered, self.parsers),
            EnvironmentClock(recorder),
            has_functions=bool(self.settings.reward.functions),
        )


def open_rollouts(settings: SidecarSettings, processes: PoolSettings, logs: Path) -> UserRollouts:
    """Open the environments that the settings name; what they log goes to a folder."""
    return EnvironmentRollouts(settings, processes, logs)


def describe_environment(
    config: EnvironmentConfig,
    reward: RewardConfig,
    folder: Path,
    secrets: Iterable[Path],
    sidecar: SidecarSettings | None,
) -> Description:
    """Describe a run's environment; raise a UsageError if the run's own sidecar would refuse it."""
    # The log is the sidecar's.
    processes = dataclasses.replace(build_pool_settings(reward, folder, secrets), log=None)
    offered = environment_pool.describe_environment(config, processes)
    if sidecar is not None:
        check_offered(offered, sidecar)
    return offered


def _build_parsers(rollout: RolloutConfig, model: Path | None, logs: Path) -> VllmReader | None:
    """Build the reader with vLLM's parsers, which is to be started; return None if no flag names a parser."""
    if rollout.tool_parser is None and rollout.reasoning_parser is None:
        return None
    assert model is not None
    make_private_folder(logs)
    names = Parsers(rollout.tool_parser, rollout.reasoning_parser, model)
    return VllmReader(str(rollout.python or sys.executable), names, logs / _LOG_FILE)


def choose_reader(chats: TemplateChats | NumberChats, offered: Description, parsers: VllmReader | None) -> Reader:
    """Choose the reader of turns with an environment that `check_offered` has let pass."""
    if isinstance(chats, NumberChats):
        return NumberReader() if offered.tools else PlainReader()
    return parsers or PlainReader()


def check_offered(offered: Description, settings: SidecarSettings) -> None:
    """Raise a UsageError if nothing gives rewards, or if nothing reads calls of the environment's tools."""
    if settings.needs_rewards and not settings.reward.functions and not offered.has_reward:
        raise UsageError(f"{offered.name} has no method get_reward: add it, or write --reward")
    rollout = settings.rollout
    if not offered.tools or rollout.engine == "scripted" or rollout.tool_parser is not None:
        return
    assert settings.hf_model is not None
    known = suggest_parser(TemplateChats.load(str(settings.hf_model)).template)
    raise UsageError(
        f"{offered.name} has tools ({', '.join(tool['function']['name'] for tool in offered.tools)}), and "
        f"{TOOL_FLAG} is missing: write {known or 'the name of the parser that vLLM has for this model'}"
    )


def build_chats(settings: SidecarSettings) -> TemplateChats | NumberChats:
    if settings.rollout.engine == "scripted" or settings.hf_model is None:
        return NumberChats()
    return TemplateChats.load(str(settings.hf_model))
