"""The gateway of a sidecar: its port is open before agents start, because they may connect to no other."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import AsyncIterator

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.gateway.agents import FunctionAgents
from megatron_rl.gateway.application import build_gateway_application
from megatron_rl.gateway.chats import Chats
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.rollout_context import Agents
from megatron_rl.gateway.verifiers import VerifiersServer
from megatron_rl.rewards.types import PoolSettings
from megatron_rl.shared.protocol.hosts import parse_place
from megatron_rl.sidecar.serving import find_url, open_listener, serve
from megatron_rl.sidecar.settings import GATEWAY_FLAG
from megatron_rl.tool_calls import Reader

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class GatewayOpening:
    """An open port, and the agents that may connect to it."""

    listener: socket.socket
    agents: Agents

    @classmethod
    def open(cls, config: EnvironmentConfig, settings: PoolSettings) -> "GatewayOpening":
        """Open the port."""
        place = parse_place(config.gateway_listen)
        assert place is not None
        listener = open_listener(*place, GATEWAY_FLAG)
        if config.verifiers is None:
            address = _find_address(listener)
            return cls(listener, FunctionAgents(config, settings, listener.getsockname()[1], address))
        return cls(
            listener, VerifiersServer(config.verifiers, config.agent_timeout, config.timeout, config.concurrency)
        )

    def build(self, chats: Chats, reader: Reader, reads_tools: bool) -> Gateway:
        """Build the gateway; `reads_tools` says that the reader finds calls of tools."""
        gateway = Gateway(chats, reader, reads_tools)
        gateway.address = _find_address(self.listener)
        return gateway

    @contextlib.asynccontextmanager
    async def serve(self, gateway: Gateway) -> AsyncIterator[None]:
        """Serve in this event loop until the context ends."""
        ended = asyncio.Event()
        serving = asyncio.create_task(serve(build_gateway_application(gateway), listener=self.listener, until=ended))
        _log.info("agents reach the policy at %s", gateway.address)
        try:
            yield
        finally:
            ended.set()
            await serving


def _find_address(listener: socket.socket) -> str:
    return f"{find_url(listener)}/v1"
