"""A response while its conversation lasts: its tokens, a few bytes each, for many conversations last at once."""

import dataclasses
import math
from array import array
from collections.abc import Sequence

import msgspec

from megatron_rl.environments.types import COMPONENT
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT
from megatron_rl.tool_calls import JSON


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A response of several turns with its messages, which reward functions read."""

    response: wire.Response
    messages: list[JSON]
    """The messages after the prompt, in OpenAI's form; the last one is the policy's. None if no function reads them."""


@dataclasses.dataclass
class Draft:
    """A response while its conversation lasts."""

    tokens: "array[int]" = dataclasses.field(default_factory=lambda: array("i"))
    log_probs: "array[float]" = dataclasses.field(default_factory=lambda: array("f"))
    spans: list[wire.VersionSpan] = dataclasses.field(default_factory=list)
    last: wire.Response | None = None
    """The policy's last turn."""
    fingerprints: set[str] = dataclasses.field(default_factory=set)
    """The fingerprints of the weights that sampled its turns."""
    are_new: list[bool] = dataclasses.field(default_factory=list)
    """False for a turn that follows the turn before it without a word of the environment: both count as one."""
    have_calls: list[bool] = dataclasses.field(default_factory=list)
    """True for a turn that called tools, which gets no reward of its own."""
    messages: list[JSON] = dataclasses.field(default_factory=list)
    """The messages after the prompt, in OpenAI's form; none if no function reads them."""

    def hear(self, tokens: Sequence[int]) -> None:
        """Add what the environment says."""
        if tokens:
            begin = len(self.tokens)
            self.tokens.extend(tokens)
            self.log_probs.extend([0.0] * len(tokens))
            self.spans.append(wire.VersionSpan(version=ENVIRONMENT, start=begin, end=len(self.tokens)))

    def say(self, turn: wire.Response) -> Sequence[int]:
        """Add a turn of the policy; return its tokens."""
        begin = len(self.tokens)
        self.are_new.append(not self.spans or self.spans[-1].version == ENVIRONMENT)
        self.have_calls.append(False)
        self.last = turn
        self.fingerprints.add(turn.fingerprint)
        self.tokens.extend(wire.decode_tokens(turn.tokens).tolist())
        self.log_probs.extend(wire.decode_log_probs(turn.log_probs).tolist())
        self.spans += [
            msgspec.structs.replace(span, start=begin + span.start, end=begin + span.end, engine=turn.engine)
            for span in turn.spans
        ]
        return self.tokens[begin:]

    def finish(
        self, seed: int, reason: wire.FinishReason, reward: float | None, turn_rewards: Sequence[float] = ()
    ) -> wire.Response:
        """Return the response; `turn_rewards` are those of its turns without calls, and are added to the reward."""
        assert self.last is not None
        if turn_rewards:
            reward = math.fsum([reward or 0.0, *turn_rewards])
            turn_rewards = self._place(turn_rewards)
        last = self.last
        spans = [
            msgspec.structs.replace(span, engine="" if span.engine == last.engine else span.engine)
            for span in self.spans
        ]
        # A turn under other weights makes the whole response one: it is refused where the group is checked.
        others = self.fingerprints - {last.fingerprint}
        return wire.Response(
            tokens=wire.encode_tokens(self.tokens),
            log_probs=wire.encode_log_probs(self.log_probs),
            finish_reason=reason,
            seed=seed,
            engine=last.engine,
            spans=spans,
            fingerprint=min(others, default=last.fingerprint),
            reward=reward or 0.0,
            turn_rewards=list(turn_rewards),
            components={COMPONENT: reward or 0.0},
        )

    def _place(self, rewards: Sequence[float]) -> list[float]:
        """Return a reward for each turn that counts; those of the last turns may be missing."""
        placed: list[float] = []
        given = iter(rewards)
        for is_new, has_calls in zip(self.are_new, self.have_calls, strict=True):
            reward = 0.0 if has_calls else next(given, 0.0)
            if is_new:
                placed.append(reward)
            else:
                placed[-1] += reward
        return placed
