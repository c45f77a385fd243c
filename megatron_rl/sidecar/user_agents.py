"""Rollouts of user-defined agents, which act through the gateway: an optional part of a sidecar."""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.confined.pool import PoolSettings
from megatron_rl.gateway.chats import Chats, NumberChats, TemplateChats
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.observe.trace import Recorder
from megatron_rl.rewards.spec import find_weights
from megatron_rl.sidecar.agent_rollouts import AgentRollouts, GatewayOpening
from megatron_rl.sidecar.group_maker import GroupHolder, Samplers
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.user_environments import UserRollouts
from megatron_rl.tool_calls import PlainReader


class GatewayRollouts(UserRollouts):
    def __init__(self, settings: SidecarSettings, processes: PoolSettings, logs: Path) -> None:
        self._opening = GatewayOpening.open(settings.environment, processes)
        super().__init__(settings, self._opening.agents, logs)
        self._chats: Chats
        self._gateway: Gateway | None = None

    async def start(self) -> None:
        build_chats = asyncio.to_thread(_build_chats, self.settings)
        _, self._chats = await asyncio.gather(self._opening.agents.start(), build_chats)

    async def open(self, engines: Samplers, recorder: Recorder, stack: contextlib.AsyncExitStack) -> GroupHolder:
        reads_tools = self.parsers is not None and self.parsers.has_tools
        self._gateway = self._opening.build(self._chats, self.parsers or PlainReader(), reads_tools)
        await stack.enter_async_context(self._opening.serve(self._gateway))
        functions = find_weights(self.settings.reward)
        return AgentRollouts(engines, self._opening.agents, self._gateway, self.on_error, functions)

    def count(self) -> Mapping[str, Any]:
        return {} if self._gateway is None else self._gateway.status()


def open_rollouts(settings: SidecarSettings, processes: PoolSettings, logs: Path) -> UserRollouts:
    """Open the gateway's port, and the agents that the settings name; what they log goes to a folder."""
    return GatewayRollouts(settings, processes, logs)


def _build_chats(settings: SidecarSettings) -> Chats:
    if settings.rollout.engine == "scripted" or settings.hf_model is None:
        return NumberChats()
    return TemplateChats.load(str(settings.hf_model))
