"""Rollouts of agents, which act through the gateway: an optional part of a sidecar, for `--rollout-agent`.

Invariants:

- a rollout's key is good while its agent acts, and everything that the policy said for it then is in its response;
- a rollout whose agent fails ends there, and is treated as `--rollout-env-on-error` says;
- one that others in its process ended begins again, with the same seed and nothing that was said before.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.confined.process import CallFailed, ProcessEnded, TooSlow
from megatron_rl.environments.types import AGENT_COMPONENT, OnError
from megatron_rl.errors import MegatronRLError
from megatron_rl.gateway.agents import AgentPool
from megatron_rl.gateway.application import build_gateway_application
from megatron_rl.gateway.chats import Chats
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import OpenRollout, Terms, TurnRequest
from megatron_rl.gateway.record import ConversationRecord, Transcript
from megatron_rl.gateway.rollout_context import Agents, RolloutContext
from megatron_rl.gateway.said import MODEL
from megatron_rl.gateway.verifiers import VerifiersServer
from megatron_rl.observe.trace import Recorder
from megatron_rl.rewards.spec import find_weights
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.hosts import parse_place
from megatron_rl.sidecar import attempts
from megatron_rl.sidecar.conversations import GroupRollouts, Sampler, build_row, name_prompt
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.group_maker import GroupHolder, Samplers
from megatron_rl.sidecar.serving import find_url, open_listener, serve
from megatron_rl.sidecar.settings import GATEWAY_FLAG, SidecarSettings
from megatron_rl.sidecar.user_environments import UserRollouts
from megatron_rl.tool_calls import PlainReader, Reader

_log = logging.getLogger(__name__)


class AgentRollouts(GroupRollouts):
    def __init__(
        self,
        sampler: Sampler,
        agents: Agents,
        gateway: Gateway,
        on_error: OnError,
        functions: Iterable[str],
        needs_rewards: bool = True,
    ) -> None:
        """Make it; `functions` are the names of reward functions: with some, agents need give no reward."""
        super().__init__(sampler, on_error)
        self._agents = agents
        self._gateway = gateway
        self._functions = frozenset(functions)
        self._needs_rewards = needs_rewards and not self._functions

    async def _hold_seeded(self, request: GroupRequest, prompt: wire.Prompt, name: str, seed: int) -> Transcript:
        for attempt in itertools.count(1):
            try:
                return await self._hold_once(request, prompt, f"{name}-{attempt}", seed)
            except CallFailed as failure:
                most = attempts.CONVERSATION if isinstance(failure, ProcessEnded) else attempts.SILENT_ROLLOUT
                # Time that was used up once would be used up again.
                if isinstance(failure, TooSlow) or attempt >= most:
                    silent = ConversationRecord(np.asarray(request.prompt_tokens, dtype="<i4"), request.sampling)
                    return Transcript(self._build_failed(silent, failure, prompt, seed, AGENT_COMPONENT), [])
                _log.warning("attempt %d: %s failed: %s", attempt, name_prompt(prompt, "agent"), failure)
        raise AssertionError("the loop returns or raises")

    async def _hold_once(self, request: GroupRequest, prompt: wire.Prompt, name: str, seed: int) -> Transcript:
        """Make a rollout; raise CallFailed if it is to begin again."""
        terms = Terms(np.asarray(request.prompt_tokens, dtype="<i4"), seed, request.sampling)

        async def sample(turn: TurnRequest) -> wire.Response:
            named = f"{name}-{turn.number}"
            return await self._sample(request, named, turn.tokens, turn.seed, turn.max_tokens, turn.after)

        with self._gateway.open(terms, sample) as (key, rollout):
            context = RolloutContext(
                build_row(prompt), self._gateway.address, key, seed, MODEL, rollout.clock, rollout.run_in
            )
            rewards = self._check_names(await self._act(context, rollout))
        if isinstance(rewards, ProcessEnded) or (isinstance(rewards, CallFailed) and not rollout.record.num_turns):
            raise rewards
        return Transcript(self._finish(prompt, rollout, rewards), rollout.messages)

    async def _act(self, context: RolloutContext, rollout: OpenRollout) -> Mapping[str, float] | CallFailed:
        """Have the agent act until it has ended or a call has ended the rollout; return its rewards or its failure."""
        acting = asyncio.ensure_future(self._agents.act(context))
        ending = asyncio.create_task(rollout.ended.wait())
        try:
            await asyncio.wait([acting, ending], return_when=asyncio.FIRST_COMPLETED)
            if rollout.fault is not None:
                raise rollout.fault
            if rollout.broken is not None:
                return CallFailed(rollout.broken)
            return acting.result()
        except ProcessEnded as ended:
            return ended
        except CallFailed as failure:
            # Many clients raise without the reason that they were told.
            if rollout.num_refused and type(failure) is CallFailed:
                return CallFailed(f"{failure}; {_explain_refusals(rollout)}")
            return failure
        finally:
            ending.cancel()
            # Refusals end an agent that is called off.
            rollout.end()
            acting.cancel()
            with contextlib.suppress(asyncio.CancelledError, CallFailed):
                await acting

    def _check_names(self, rewards: Mapping[str, float] | CallFailed) -> Mapping[str, float] | CallFailed:
        """Fail a rollout with a reward whose place a function's values would take."""
        if isinstance(rewards, CallFailed) or not (both := self._functions & rewards.keys()):
            return rewards
        name = min(both)
        return CallFailed(f"returned a reward named {name}, and --reward has a function {name}: rename one")

    def _finish(
        self, prompt: wire.Prompt, rollout: OpenRollout, rewards: Mapping[str, float] | CallFailed
    ) -> wire.Response:
        record, seed = rollout.record, rollout.terms.seed
        if isinstance(rewards, CallFailed):
            if rollout.limit is None:
                return self._build_failed(record, rewards, prompt, seed, AGENT_COMPONENT)
            # An agent may raise because a call was refused at the limits, which the policy has reached.
            reward, name = self._on_error.reward or 0.0, name_prompt(prompt, "agent")
            _log.warning(
                "%s reached a limit (%s) and failed: %s: its reward is %g", name, rollout.limit, rewards, reward
            )
            return record.build_response(seed, "limit", {AGENT_COMPONENT: reward})
        if not record.num_turns:
            raise MegatronRLError(
                f"{name_prompt(prompt, 'agent')} left nothing to train on: {_explain_silence(rollout)}"
            )
        if not rewards and self._needs_rewards:
            raise MegatronRLError(f"{name_prompt(prompt, 'agent')} returned None: return a reward, or write --reward")
        most = rollout.terms.sampling.max_tokens
        response = record.build_response(seed, "stop" if rollout.limit is None else "limit", {**rewards})
        if rollout.limit is not None or not rollout.is_cut or record.num_tokens < most:
            return response
        # In the order of the response, calls that came side by side may share more tokens than as they came.
        reason = "length" if len(response.tokens) == 4 * most else "limit"
        return msgspec.structs.replace(response, finish_reason=reason)


def _explain_silence(rollout: OpenRollout) -> str:
    """Explain why a rollout has no turn of the policy."""
    if rollout.limit is not None:
        return f"it had no answer: {rollout.limit}"
    if rollout.num_refused:
        return _explain_refusals(rollout)
    return "it ended without a call of the gateway"


def _explain_refusals(rollout: OpenRollout) -> str:
    if rollout.num_refused == 1:
        return f"one of its calls was refused: {rollout.last_refusal}"
    return f"{rollout.num_refused} of its calls were refused, the last one because {rollout.last_refusal}"


@dataclasses.dataclass(frozen=True)
class GatewayOpening:
    """An open port, and the agents that may connect to it."""

    listener: socket.socket
    agents: Agents
    advises: bool = False

    @classmethod
    def open(cls, config: EnvironmentConfig, settings: PoolSettings) -> "GatewayOpening":
        place = parse_place(config.gateway_listen)
        assert place is not None
        listener = open_listener(*place, GATEWAY_FLAG)
        agents: Agents
        if config.verifiers is None:
            agents = AgentPool(config, settings, listener.getsockname()[1], _find_address(listener))
        else:
            agents = VerifiersServer(config.verifiers, config.agent_timeout, config.timeout, config.concurrency)
        return cls(listener, agents, config.gateway_advises)

    def build(self, chats: Chats, reader: Reader, reads_tools: bool) -> Gateway:
        """Build the gateway; `reads_tools` says that the reader finds calls of tools."""
        gateway = Gateway(chats, reader, reads_tools, self.advises)
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


class GatewayRollouts(UserRollouts):
    def __init__(self, settings: SidecarSettings, processes: PoolSettings, logs: Path) -> None:
        self._opening = GatewayOpening.open(settings.environment, processes)
        super().__init__(settings, self._opening.agents, logs)
        self._gateway: Gateway | None = None

    async def open(self, engines: Samplers, recorder: Recorder, stack: contextlib.AsyncExitStack) -> GroupHolder:
        reads_tools = self.parsers is not None and self.parsers.has_tools
        self._gateway = self._opening.build(self.chats, self.parsers or PlainReader(), reads_tools)
        await stack.enter_async_context(self._opening.serve(self._gateway))
        functions = find_weights(self.settings.reward)
        needs_rewards = self.settings.needs_rewards
        return AgentRollouts(engines, self._opening.agents, self._gateway, self.on_error, functions, needs_rewards)

    def count(self) -> Mapping[str, Any]:
        return {} if self._gateway is None else self._gateway.status()


def open_rollouts(settings: SidecarSettings, processes: PoolSettings, logs: Path) -> UserRollouts:
    """Open the gateway's port, and the agents that the settings name; what they log goes to a folder."""
    return GatewayRollouts(settings, processes, logs)
