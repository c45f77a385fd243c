"""Agents that a test writes, with a gateway and with engines that need no model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.environments.types import OnError
from megatron_rl.gateway.chats import NumberChats
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.agent_rollouts import AgentRollouts, GatewayOpening
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.tool_calls import PlainReader
from tests.reward_pools import leftovers
from tests.turns import make_turn

CALLERS = """
import http.client, json, time
from urllib.parse import urlsplit

import openai

MESSAGES = [{"role": "user", "content": "7 8"}]

def idle(base_url, api_key, model):
    time.sleep(1.0)

def plain(base_url, api_key, model):
    begun, place = time.monotonic(), urlsplit(base_url)
    for _ in range(2):
        connection = http.client.HTTPConnection(place.hostname, place.port)
        body = json.dumps({"model": model, "messages": MESSAGES})
        connection.request("POST", place.path + "/chat/completions", body, {"authorization": "Bearer " + api_key})
        assert "choices" in json.loads(connection.getresponse().read())
    return begun

def client(base_url, api_key, model):
    begun, policy = time.monotonic(), openai.OpenAI()
    for _ in range(2):
        policy.chat.completions.create(model=model, messages=MESSAGES)
    return begun
"""
"""Agents that make two calls, each with another client, or none; they return the time of their first line."""


MINUS_ONE = OnError(reward=-1.0)


class Engines:
    """Engines that say the length of what they heard, and the seed's last digits."""

    def __init__(self) -> None:
        self.requests: list[GroupRequest] = []
        self.longest = 1000
        """The length of the longest prompt that is answered."""

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        self.requests.append(request)
        if len(request.prompt_tokens) > self.longest:
            await asyncio.sleep(3600)
        tokens = [len(request.prompt_tokens), request.seed % 50][: request.sampling.max_tokens]
        return [make_turn(tokens, seed=request.seed, finish_reason="stop" if len(tokens) == 2 else "length")]


class World:
    """Agents with a gateway and engines."""

    def __init__(self, opening: GatewayOpening, engines: Any, chats: Any) -> None:
        self.agents: Any = opening.agents
        self.engines = engines
        self.gateway = opening.build(chats, PlainReader(), reads_tools=False)

    def build_rollouts(self, on_error: OnError, functions: Sequence[str]) -> AgentRollouts:
        return AgentRollouts(self.engines, self.agents, self.gateway, on_error, functions)

    async def act(
        self,
        number: int = 4,
        size: int = 1,
        on_error: OnError = MINUS_ONE,
        functions: Sequence[str] = (),
        sampling: Mapping[str, int] | None = None,
        **columns: Any,
    ) -> list[wire.Response]:
        """Make the group of a prompt of these columns, whose number names it."""
        rollouts = self.build_rollouts(on_error, functions)
        terms = wire.Sampling(**{"max_tokens": 30, "max_turns": 4, **(sampling or {})})
        prompt = wire.Prompt(index=number, row=f"rows:{number}", tokens=b"", text="7 8", columns=columns)
        request = GroupRequest(f"{number}", (7, 8), size, 100, terms, prompt=number)
        return [one.response for one in await rollouts.hold_group(request, prompt)]


@contextlib.asynccontextmanager
async def acting(
    folder: Path, text: str, name: str = "act", engines: Any = None, chats: Any = None, **changes: Any
) -> AsyncIterator[World]:
    """Start agents, each a call of this function of the text; fail if they leave a process."""
    file = folder / "agent.py"
    file.write_text(text)
    config = EnvironmentConfig(**{"agent": f"{file}:{name}", "workers": 1, "agent_timeout": 300.0, **changes})
    opening = GatewayOpening.open(config, PoolSettings(log=folder / "log"))
    world = World(opening, engines or Engines(), chats or NumberChats())
    try:
        await opening.agents.start()
        async with opening.serve(world.gateway):
            yield world
    finally:
        opening.listener.close()
        await opening.agents.close()
        assert leftovers() == []
