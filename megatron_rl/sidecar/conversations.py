"""Conversations of the policy with environments: the responses of a run with `--rollout-env`.

Invariants:

- what has been said is never changed: each turn of the policy is sampled after the tokens of all turns before it;
- every turn of a conversation is sampled under one version, and says so itself;
- the seeds of turns follow from the response's seed, so a conversation that is held again is the same, if its
  environment is;
- a conversation whose environment fails ends there, with the reward for failures, or fails its group with an error.
"""

import asyncio
import dataclasses
import hashlib
import itertools
import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from megatron_rl.environments.pool import Conversation, EnvironmentPool
from megatron_rl.environments.types import EnvironmentFailed, WorkerEnded
from megatron_rl.errors import MegatronRLError
from megatron_rl.gateway.said import write_said
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.drafts import Draft, Transcript
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.environment_times import EnvironmentClock
from megatron_rl.sidecar.texts import Texts, write_results
from megatron_rl.tool_calls import JSON, PlainReader, Reader, Said

_log = logging.getLogger(__name__)

# The attempts to hold a conversation that others in its process may have ended.
_MAX_ATTEMPTS = 8


class Sampler(Protocol):
    """The engines together, which sample turns."""

    async def generate(self, request: GroupRequest) -> list[wire.Response]: ...


class Conversations:
    """Holds the conversations of groups."""

    def __init__(
        self,
        sampler: Sampler,
        pool: EnvironmentPool,
        texts: Texts,
        on_error: float | None,
        has_reward: bool,
        has_step: bool = True,
        tools: Sequence[JSON] = (),
        reader: Reader | None = None,
        clock: EnvironmentClock | None = None,
        has_functions: bool = False,
    ) -> None:
        """Make it; `on_error` is the reward of a conversation whose environment fails, None to fail its group.

        Without `has_step` a turn that calls no tool ends its conversation. With `has_functions` the messages of
        conversations are kept, for the reward functions.
        """
        self.clock = clock or EnvironmentClock()
        self._sampler = sampler
        self._pool = pool
        self._texts = texts
        self._on_error = on_error
        self._has_reward = has_reward
        self._has_step = has_step
        self._tools = tools
        self._reader = reader or PlainReader()
        self._has_functions = has_functions

    async def hold_group(self, request: GroupRequest, prompt: wire.Prompt) -> list[Transcript]:
        """Hold the conversations of a group, all at once."""
        self._texts.check_prompt(prompt)
        self.clock.begin_group(request)
        try:
            async with asyncio.TaskGroup() as tasks:
                held = [tasks.create_task(self._hold(request, prompt, one)) for one in range(request.group_size)]
        except BaseExceptionGroup as group:
            # The first failure is the reason; it cancelled the others.
            raise group.exceptions[0] from None
        return [task.result() for task in held]

    async def _hold(self, request: GroupRequest, prompt: wire.Prompt, number: int) -> Transcript:
        """Hold a conversation, again if others in its process ended it."""
        is_alone = False
        for attempt in itertools.count(1):
            try:
                return await self._hold_once(request, prompt, number, is_alone)
            except WorkerEnded as ended:
                if is_alone:
                    raise _describe(ended, prompt) from None
                _log.warning("attempt %d: %s", attempt, _describe(ended, prompt))
                # One that may be the cause shares no process from now on, nor does one that others have ended often.
                is_alone = ended.had_call or attempt + 1 == _MAX_ATTEMPTS
            except EnvironmentFailed as failure:
                raise _describe(failure, prompt) from None
        raise AssertionError("the loop returns or raises")

    async def _hold_once(self, request: GroupRequest, prompt: wire.Prompt, number: int, is_alone: bool) -> Transcript:
        """Hold a conversation; raise EnvironmentFailed if it fails before the policy's turn, or is to be held again."""
        seed, draft = request.seed + number, Draft()
        try:
            async with self._pool.hold(_row(prompt), seed, is_alone, self.clock.note(request)) as conversation:
                reason = await self._converse(request, prompt, number, conversation, draft)
                reward = await conversation.get_reward() if self._has_reward else None
        except EnvironmentFailed as failure:
            is_to_be_repeated = isinstance(failure, WorkerEnded) and not is_alone
            if is_to_be_repeated or draft.last is None or self._on_error is None:
                raise
            _log.warning("%s: its reward is %g", _describe(failure, prompt), self._on_error)
            failed = msgspec.structs.replace(draft.finish(seed, "failed", self._on_error), failure=str(failure))
            return Transcript(failed, draft.messages)
        return Transcript(draft.finish(seed, reason, reward, conversation.turn_rewards), draft.messages)

    async def _converse(
        self, request: GroupRequest, prompt: wire.Prompt, number: int, conversation: Conversation, draft: Draft
    ) -> wire.FinishReason:
        """Take turns until the conversation is over; return why it is."""
        sampling = request.sampling
        draft.hear(self._texts.open(prompt, conversation.opening))
        if len(draft.tokens) >= sampling.max_tokens:
            raise EnvironmentFailed(
                f"its first words take {len(draft.tokens)} tokens, and a response may have {sampling.max_tokens}"
            )
        for turn in range(sampling.max_turns):
            (sampled,) = await self._sampler.generate(_request_turn(request, number, turn, draft))
            tokens = draft.say(sampled)
            said = await self._reader.read(tokens, self._texts.decode(tokens), self._tools)
            if self._has_functions:
                draft.messages.append(write_said(said))
            if sampled.finish_reason != "stop":
                return sampled.finish_reason
            messages, reply = await self._answer(prompt, conversation, draft, said, tokens)
            if not messages:
                return "stop"
            if turn + 1 == sampling.max_turns or len(draft.tokens) + len(reply) >= sampling.max_tokens:
                return "limit"
            if self._has_functions:
                draft.messages += messages
            draft.hear(reply)
        raise AssertionError("a conversation has at least one turn")

    async def _answer(
        self, prompt: wire.Prompt, conversation: Conversation, draft: Draft, said: Said, tokens: Sequence[int]
    ) -> tuple[list[JSON], list[int]]:
        """Return the messages of the environment's answer to a turn and their tokens; no message ends it."""
        if said.tool_calls and self._tools:
            draft.have_calls[-1] = True
            results = [await conversation.use(call.name, call.arguments) for call in said.tool_calls]
            messages = write_results(said.tool_calls, results)
            return messages, self._texts.answer(said.tool_calls, results, tokens)
        heard = await conversation.step(said.content) if self._has_step else None
        if heard is None:
            return [], []
        return [{"role": "user", "content": heard}], self._texts.reply(prompt, heard, tokens[-1])


def _request_turn(request: GroupRequest, number: int, turn: int, draft: Draft) -> GroupRequest:
    """Build the request for a turn, after all that has been said."""
    left = request.sampling.max_tokens - len(draft.tokens)
    sampling = request.sampling
    return dataclasses.replace(
        request,
        request_id=f"{request.request_id}-{number}-{turn}",
        prompt_tokens=array("i", request.prompt_tokens) + draft.tokens,
        group_size=1,
        seed=_derive_seed(request.seed + number, turn),
        sampling=wire.Sampling(
            max_tokens=left,
            temperature=sampling.temperature,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            min_tokens=min(sampling.min_tokens, left),
        ),
        after=draft.last.engine if draft.last else None,
        # It waits for an engine from now on.
        since=None,
    )


def _derive_seed(seed: int, turn: int) -> int:
    """Derive the seed of a turn: two turns with one seed would draw the same random numbers."""
    if turn == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{turn}".encode(), digest_size=8).digest(), "little") >> 2


def _row(prompt: wire.Prompt) -> Mapping[str, Any]:
    return {**prompt.columns, "prompt": prompt.text}


def _describe(failure: EnvironmentFailed, prompt: wire.Prompt) -> MegatronRLError:
    row = f" ({prompt.row})" if prompt.row else ""
    return MegatronRLError(f"the environment of prompt {prompt.index}{row} failed: {failure}")
