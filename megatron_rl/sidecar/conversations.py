"""Conversations of the policy with environments: the responses of a run with `--rollout-env`.

Invariants:

- what has been said is never changed: each turn of the policy is sampled after the tokens of all turns before it;
- every turn of a conversation is sampled under one version, and says so itself;
- the seeds of turns follow from the response's seed, so a conversation that is held again is the same, if its
  environment is;
- a conversation whose environment fails ends there, and is treated as `--rollout-env-on-error` says.
"""

import asyncio
import dataclasses
import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from megatron_rl.confined.process import CallFailed, OwnProcessEnded, ProcessEnded, TooSlow
from megatron_rl.environments.pool import Conversation, EnvironmentPool, Note
from megatron_rl.environments.types import COMPONENT, ON_ERROR_FLAG, Description, OnError
from megatron_rl.errors import MegatronRLError
from megatron_rl.gateway.chats import NumberChats, TemplateChats, write_results
from megatron_rl.gateway.record import ConversationRecord, Transcript
from megatron_rl.gateway.said import write_said
from megatron_rl.observe.trace import GROUPS, Recorder
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import derive_refill_seed
from megatron_rl.shared.protocol.wire import EnvironmentTimes
from megatron_rl.sidecar import attempts
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.tool_calls import JSON, PlainReader, Reader, Said

_log = logging.getLogger(__name__)
# The calls that answer no turn of the policy.
_BESIDE_TURNS = ("place", "open", "reward", "close")


class EnvironmentClock:
    """Takes the times of the calls of environments."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder(most=0)
        self._seconds: list[float] = []

    def begin_group(self, request: GroupRequest) -> None:
        """Note that a group has waited until now for its conversations to begin."""
        now = self._recorder.now()
        since = now if request.since is None else request.since
        self._recorder.add(self._kind("queue", request), since, now, request.prompt)

    def note(self, request: GroupRequest) -> Note:
        """Return the function that notes the calls of a group's environments."""
        recorder = self._recorder

        def begin(call: str) -> Callable[[], None]:
            begun = recorder.now()

            def end() -> None:
                now = recorder.now()
                recorder.add(self._kind("environment", request, call=call), begun, now, request.prompt)
                if call not in _BESIDE_TURNS and not request.can_wait:
                    self._seconds.append(now - begun)

            return end

        return begin

    def end_iteration(self) -> EnvironmentTimes | None:
        """Return the seconds of the answers to turns since the last iteration; None without any."""
        seconds, self._seconds = self._seconds, []
        if not seconds:
            return None
        return EnvironmentTimes(mean=float(np.mean(seconds)), p95=float(np.quantile(seconds, 0.95)))

    def _kind(self, name: str, request: GroupRequest, **details: str) -> int:
        evaluation = {"evaluation": True} if request.can_wait else {}
        return self._recorder.kind(GROUPS, name, **details, **evaluation)


class Sampler(Protocol):
    """The engines together, which sample turns."""

    async def generate(self, request: GroupRequest) -> list[wire.Response]: ...


class GroupRollouts:
    """Makes the responses of groups, each in a rollout of the policy with user-defined code."""

    def __init__(self, sampler: Sampler, on_error: OnError, clock: EnvironmentClock | None = None) -> None:
        self.clock = clock or EnvironmentClock()
        self._sampler = sampler
        self._on_error = on_error

    async def hold_group(self, request: GroupRequest, prompt: wire.Prompt) -> list[Transcript]:
        """Hold the rollouts of a group, all at once."""
        try:
            # A task group cancels each task once: a second time would break off the end of an agent.
            async with asyncio.TaskGroup() as tasks:
                held = [tasks.create_task(self._hold(request, prompt, number)) for number in range(request.group_size)]
        except BaseExceptionGroup as group:
            # The first failure is the reason; it cancelled the others.
            raise group.exceptions[0] from None
        return [task.result() for task in held]

    async def _hold(self, request: GroupRequest, prompt: wire.Prompt, number: int) -> Transcript:
        """Hold the rollout of a response, with another seed if it failed and may be refilled."""
        refilled: tuple[wire.Cause, ...] = ()
        while True:
            seed = derive_refill_seed(request.seed + number, len(refilled))
            held = await self._hold_seeded(request, prompt, f"{number}-{len(refilled)}", seed)
            response = held.response
            if not response.cause or len(refilled) == self._on_error.num_refills:
                return (
                    Transcript(msgspec.structs.replace(response, refilled=refilled), held.messages)
                    if refilled
                    else held
                )
            refilled += (response.cause,)

    async def _hold_seeded(self, request: GroupRequest, prompt: wire.Prompt, name: str, seed: int) -> Transcript:
        """Hold a rollout, again with this seed if others in its process ended it; `name` tells it from others."""
        raise NotImplementedError

    def _build_failed(
        self, record: ConversationRecord, failure: CallFailed, prompt: wire.Prompt, seed: int, what: str
    ) -> wire.Response:
        """Build the response of a rollout that failed; raise the failure if it ends the run."""
        # Nothing that the policy said could have a reward.
        reward = self._on_error.reward if record.num_turns else None
        if self._on_error.stops:
            raise MegatronRLError(
                f"{name_prompt(prompt, what)} failed: {failure}; correct it, or leave failures out of training with "
                f"{ON_ERROR_FLAG} exclude"
            )
        told = "it is not scored" if reward is None else f"its reward is {reward:g}"
        _log.warning("%s failed: %s: %s", name_prompt(prompt, what), failure, told)
        cause: wire.Cause = "raised"
        if isinstance(failure, TooSlow | ProcessEnded | OwnProcessEnded):
            cause = "timeout" if isinstance(failure, TooSlow) else "process"
        components = None if reward is None else {what: reward}
        return record.build_response(seed, "failed", components, failure=str(failure), cause=cause)

    async def _sample(
        self, request: GroupRequest, name: str, tokens: Sequence[int], seed: int, max_tokens: int, after: str | None
    ) -> wire.Response:
        (turn,) = await self._sampler.generate(request_turn(request, name, tokens, seed, max_tokens, after))
        return turn


class Conversations(GroupRollouts):
    def __init__(
        self,
        sampler: Sampler,
        pool: EnvironmentPool,
        chats: TemplateChats | NumberChats,
        on_error: OnError,
        offered: Description,
        reader: Reader | None = None,
        clock: EnvironmentClock | None = None,
        has_functions: bool = False,
    ) -> None:
        """Make it for environments that offer this.

        If they do not answer text, a turn that calls no tool ends its conversation. With `has_functions` the messages
        of conversations are kept, for the reward functions.
        """
        super().__init__(sampler, on_error, clock)
        self._pool = pool
        self._chats = chats
        self._offered = offered
        self._reader = reader or PlainReader()
        self._has_functions = has_functions

    async def hold_group(self, request: GroupRequest, prompt: wire.Prompt) -> list[Transcript]:
        self._chats.check_prompt(prompt)
        self.clock.begin_group(request)
        return await super().hold_group(request, prompt)

    async def _hold_seeded(self, request: GroupRequest, prompt: wire.Prompt, name: str, seed: int) -> Transcript:
        is_alone = False
        for attempt in itertools.count(1):
            try:
                return await self._hold_once(request, prompt, name, seed, is_alone)
            except ProcessEnded as ended:
                _log.warning("attempt %d: %s failed: %s", attempt, name_prompt(prompt, COMPONENT), ended)
                # One that may be the cause shares no process from now on, nor does one that others have ended often.
                is_alone = ended.had_call or attempt + 1 == attempts.CONVERSATION
        raise AssertionError("the loop returns or raises")

    async def _hold_once(
        self, request: GroupRequest, prompt: wire.Prompt, name: str, seed: int, is_alone: bool
    ) -> Transcript:
        """Hold a conversation; raise ProcessEnded if it is to be held again."""
        record = ConversationRecord(np.asarray(request.prompt_tokens, dtype="<i4"), request.sampling)
        draft = _Draft(record)
        try:
            async with self._pool.hold(build_row(prompt), seed, is_alone, self.clock.note(request)) as conversation:
                reason = await self._converse(request, prompt, name, seed, conversation, draft)
                reward = await conversation.get_reward() if self._offered.has_reward else 0.0
        except CallFailed as failure:
            if isinstance(failure, ProcessEnded) and not is_alone:
                raise
            return Transcript(self._build_failed(record, failure, prompt, seed, COMPONENT), draft.messages)
        rewards = conversation.turn_rewards
        components = {COMPONENT: math.fsum([reward, *rewards]) or 0.0}
        response = draft.record.build_response(seed, reason, components, rewards, draft.have_calls)
        return Transcript(response, draft.messages)

    async def _converse(
        self,
        request: GroupRequest,
        prompt: wire.Prompt,
        name: str,
        seed: int,
        conversation: Conversation,
        draft: "_Draft",
    ) -> wire.FinishReason:
        """Take turns until the conversation is over; return why it is."""
        record = draft.record
        opening = self._chats.open(prompt, conversation.opening)
        if not record.hear(opening):
            most = request.sampling.max_tokens
            raise CallFailed(f"its first words take {len(opening)} tokens, and a response may have {most}")
        for turn in itertools.count():
            before, left = record.read_heard()
            turn_seed = _derive_seed(seed, turn)
            sampled = await self._sample(request, f"{name}-{turn}", before, turn_seed, left, record.last_engine)
            reason = await self._follow(prompt, conversation, draft, sampled)
            if reason is not None:
                return reason
            # Thousands of conversations wait for turns, and the record has all that the next one needs.
            del before, sampled
        raise AssertionError("the loop returns")

    async def _follow(
        self, prompt: wire.Prompt, conversation: Conversation, draft: "_Draft", sampled: wire.Response
    ) -> wire.FinishReason | None:
        """Note a turn and the environment's answer to it; return why the conversation is over, None if it is not."""
        record = draft.record
        tokens = record.say(sampled)
        said = await self._reader.read(tokens, self._chats.decode(tokens), self._offered.tools)
        if self._has_functions:
            draft.messages.append(write_said(said))
        if sampled.finish_reason != "stop":
            return sampled.finish_reason
        messages = await self._answer(conversation, draft, said)
        if not messages:
            return "stop"
        calls = said.tool_calls if self._offered.tools else ()
        if not record.hear(self._chats.follow(prompt, messages, tokens, calls)):
            return "limit"
        if self._has_functions:
            draft.messages += messages
        return None

    async def _answer(self, conversation: Conversation, draft: "_Draft", said: Said) -> list[JSON]:
        """Return the messages of the environment's answer to a turn; none ends the conversation."""
        if said.tool_calls and self._offered.tools:
            draft.have_calls.add(draft.record.num_turns)
            results = [await conversation.use(call.name, call.arguments) for call in said.tool_calls]
            return write_results(said.tool_calls, results)
        heard = await conversation.step(said.content) if self._offered.has_step else None
        return [] if heard is None else [{"role": "user", "content": heard}]


@dataclasses.dataclass(slots=True)
class _Draft:
    """A response while its conversation lasts."""

    record: ConversationRecord
    have_calls: set[int] = dataclasses.field(default_factory=set)
    """The numbers of the turns that called tools, which get no rewards of their own."""
    messages: list[JSON] = dataclasses.field(default_factory=list)
    """The messages after the prompt, in OpenAI's form; none if no function reads them."""


def build_row(prompt: wire.Prompt) -> dict[str, Any]:
    """Build the row that an environment or agent gets."""
    return {**prompt.columns, "prompt": prompt.text}


def request_turn(
    request: GroupRequest, name: str, tokens: Sequence[int], seed: int, max_tokens: int, after: str | None
) -> GroupRequest:
    """Build the request for a turn of a conversation, after these tokens; `name` tells it from others of its group."""
    fewest = min(request.sampling.min_tokens, max_tokens)
    return dataclasses.replace(
        request,
        request_id=f"{request.request_id}-{name}",
        prompt_tokens=tokens,
        group_size=1,
        seed=seed,
        sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens, min_tokens=fewest, max_turns=0),
        after=after,
        # It waits for an engine from now on.
        since=None,
    )


def _derive_seed(seed: int, turn: int) -> int:
    """Derive the seed of a turn: two turns with one seed would draw the same random numbers."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{turn}".encode(), digest_size=8).digest(), "little") >> 2


def name_prompt(prompt: wire.Prompt, what: str) -> str:
    """Name the environment or agent of a prompt."""
    row = f" ({prompt.row})" if prompt.row else ""
    return f"the {what} of prompt {prompt.index}{row}"
