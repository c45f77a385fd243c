"""The record of a conversation: a tree of the tokens that follow the prompt, as one response, within its limits.

Conversations with environments add turn after turn to one chain; agents may call from anywhere.

Invariants:

- a turn stands after exactly the tokens that it was sampled after;
- tokens of the policy stand in the response once, with the log-probs and spans of their sampling;
- two calls share the first tokens of their prompts that are equal, and each keeps what it sampled itself;
- calls in another order of arrival give the same response;
- a record keeps a few bytes a token, for many conversations last at once.
"""

import dataclasses
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT
from megatron_rl.tool_calls import JSON


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A response of several turns with its messages, which reward functions read."""

    response: wire.Response
    messages: list[JSON]
    """The messages after the prompt, in OpenAI's form; the last one is the policy's. None if no function reads them."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallPart:
    """The tokens that a call added: those of its prompt that were not recorded, and then a turn."""

    parent: int
    """The number of the part whose tokens it follows."""
    after: int
    """The number of tokens, from the first of all, that it shares with the parent's path."""
    data: bytes
    """Its tokens as they travel: an array would take twice the memory of a short turn."""
    num_given: int
    """The number of its tokens that the policy did not sample, which stand first."""
    log_probs: bytes = b""
    """The provenance of the turn, as engines send it; empty for the group's prompt, which is part 0."""
    spans: Sequence[wire.VersionSpan] = ()
    engine: str = ""
    fingerprint: str = ""

    @property
    def tokens(self) -> np.ndarray:
        return wire.decode_tokens(self.data)

    @property
    def end(self) -> int:
        """The number of tokens from the first of all to its end."""
        return self.after + len(self.data) // 4


class ConversationRecord:
    """The parts of a conversation, in the order in which they came."""

    def __init__(self, prompt: np.ndarray, sampling: wire.Sampling) -> None:
        self.parts = [CallPart(0, 0, wire.encode_tokens(prompt), len(prompt))]
        self._sampling = sampling
        self.num_tokens = 0
        """The number of tokens of the response."""
        self._heard = b""
        self._is_chain = True

    @property
    def num_turns(self) -> int:
        return len(self.parts) - 1

    @property
    def last_engine(self) -> str | None:
        """The engine of the last turn; None before the first."""
        return self.parts[-1].engine or None

    def count_left(self, prompt: np.ndarray) -> int:
        """Count the tokens that are left for a turn after `prompt`."""
        _, num_shared = self.find_shared(prompt)
        return self._sampling.max_tokens - self.num_tokens - (len(prompt) - num_shared)

    def hear(self, tokens: Sequence[int]) -> bool:
        """Note what was said after the last turn, for the next one; return False if no token would be left for it."""
        if self.num_turns >= self._sampling.max_turns or self.num_tokens + len(tokens) >= self._sampling.max_tokens:
            return False
        self._heard = wire.encode_tokens(tokens)
        return True

    def read_heard(self) -> tuple["array[int]", int]:
        """Return all tokens before the next turn of a chain, and the number of tokens that are left for it."""
        tokens = array("i", b"".join([*(part.data for part in self.parts), self._heard]))
        return tokens, self._sampling.max_tokens - self.num_tokens - len(self._heard) // 4

    def say(self, turn: wire.Response) -> "array[int]":
        """Add the next turn of a chain; return its tokens."""
        self._append(len(self.parts) - 1, self.parts[-1].end, self._heard, turn.tokens, turn)
        self._heard = b""
        return array("i", turn.tokens)

    def read_path(self, number: int) -> np.ndarray:
        """Return all tokens from the first one to the end of a part."""
        if self._is_chain:
            return np.concatenate([part.tokens for part in self.parts[: number + 1]])
        end: int | None = None
        pieces = []
        # In a loop: a rollout may have more turns than calls may be nested.
        while True:
            part = self.parts[number]
            # The child has the first tokens of its parent alone.
            begin = part.after
            pieces.append(part.tokens if end is None else part.tokens[: max(0, end - begin)])
            if number == 0:
                return np.concatenate(pieces[::-1])
            end = begin if end is None else min(end, begin)
            number = part.parent

    def find_shared(self, tokens: np.ndarray) -> tuple[int, int]:
        """Find the part with the most first tokens in common; return it, and the number of these tokens."""
        shared: list[int] = []
        best = 0
        for number, part in enumerate(self.parts):
            num_shared = min(shared[part.parent], part.after) if number else 0
            if num_shared == part.after:
                num_shared += _count_equal(part.tokens, tokens[num_shared:])
            shared.append(num_shared)
            # The first of several that share as much: the others only follow it.
            if num_shared > shared[best]:
                best = number
        return best, shared[best]

    def add(self, prompt: np.ndarray, turn: wire.Response) -> int:
        """Add a turn that was sampled after `prompt`; return the number of its part."""
        return self._add(prompt, turn.tokens, turn)

    def _add(self, prompt: np.ndarray, sampled: bytes, turn: wire.Response | CallPart) -> int:
        parent, after = self.find_shared(prompt)
        self._append(parent, after, wire.encode_tokens(prompt[after:]), sampled, turn)
        return len(self.parts) - 1

    def _append(self, parent: int, after: int, given: bytes, sampled: bytes, turn: wire.Response | CallPart) -> None:
        self._is_chain &= parent == len(self.parts) - 1 and after == self.parts[parent].end
        data, spans = given + sampled, tuple(turn.spans)
        self.parts.append(
            CallPart(parent, after, data, len(given) // 4, turn.log_probs, spans, turn.engine, turn.fingerprint)
        )
        self.num_tokens += len(data) // 4

    def build_response(
        self,
        seed: int,
        reason: wire.FinishReason,
        components: Mapping[str, float] | None,
        turn_rewards: Sequence[float] = (),
        have_calls: Collection[int] = (),
        failure: str = "",
        cause: wire.Cause = "",
    ) -> wire.Response:
        """Build the response, with the sum of the components as its reward; without them it is not scored.

        `turn_rewards` are the rewards of the turns of a chain, but for those that called tools, which `have_calls`
        counts from 1.
        """
        if not self.num_turns:
            assert components is None
            return wire.Response(
                tokens=b"", log_probs=b"", finish_reason=reason, seed=seed, engine="", spans=[], fingerprint="",
                reward=None, failure=failure, cause=cause,
            )  # fmt: skip
        # A chain is in order as it is.
        parts, branches = _lay_out(self if self._is_chain else self._sort())
        last = parts[-1]
        # A turn under other weights makes the whole response one: it is refused where the group is checked.
        others = [part.fingerprint for part in self.parts[1:] if part.fingerprint != last.fingerprint]
        return wire.Response(
            tokens=b"".join(part.data for part in parts),
            log_probs=b"".join(_read_log_probs(part) for part in parts),
            finish_reason=reason,
            seed=seed,
            engine=last.engine,
            spans=[*_list_spans(parts, last.engine)],
            branches=branches,
            fingerprint=others[0] if others else last.fingerprint,
            reward=None if components is None else sum(components.values()),
            turn_rewards=self._place(turn_rewards, have_calls) if turn_rewards else [],
            components={**(components or {})},
            failure=failure,
            cause=cause,
        )

    def _place(self, rewards: Sequence[float], have_calls: Collection[int]) -> list[float]:
        """Return a reward for each turn that counts; those of the last turns may be missing.

        A turn that follows the turn before it without a word of the environment counts as one with it.
        """
        placed: list[float] = []
        given = iter(rewards)
        for number, part in enumerate(self.parts[1:], 1):
            reward = 0.0 if number in have_calls else next(given, 0.0)
            if number == 1 or part.num_given:
                placed.append(reward)
            else:
                placed[-1] += reward
        return placed

    def get_order(self, number: int) -> tuple[Any, ...]:
        """Return a key that orders calls by their tokens: a call comes after those that it extends."""
        prompt = self._read_prompt(number)
        return len(prompt), prompt.tobytes(), self._read_sampled(number), self.parts[number].log_probs

    def get_depth(self, number: int) -> tuple[Any, ...]:
        """Return a key that orders calls by how far they continue the row's prompt; other calls come first."""
        prompt, order = self.parts[0].tokens, self.get_order(number)
        return np.array_equal(self._read_prompt(number)[: len(prompt)], prompt), *order

    def _read_prompt(self, number: int) -> np.ndarray:
        """Return the tokens that a call was sampled after."""
        path, part = self.read_path(number), self.parts[number]
        return path[: len(path) - len(part.tokens) + part.num_given]

    def _read_sampled(self, number: int) -> bytes:
        part = self.parts[number]
        return part.data[4 * part.num_given :]

    def _sort(self) -> "ConversationRecord":
        """Add all turns again in an order that follows from their tokens: a call comes after those that it extends."""
        sorted_record = ConversationRecord(self.parts[0].tokens, self._sampling)
        for number in sorted(range(1, len(self.parts)), key=self.get_order):
            sorted_record._add(self._read_prompt(number), self._read_sampled(number), self.parts[number])
        return sorted_record


def _lay_out(record: ConversationRecord) -> tuple[list[CallPart], list[wire.Branch]]:
    """Lay the parts out, each before those that follow it; one that continues a part stands right after it."""
    followers: list[list[int]] = [[] for _ in record.parts]
    for number, part in enumerate(record.parts[1:], 1):
        followers[part.parent].append(number)
    parts: list[CallPart] = []
    branches: list[wire.Branch] = []
    end = 0
    # Tokens of the prompt are counted from its end: -1 is its last one.
    starts = {0: -record.parts[0].end}
    waiting = [0]
    while waiting:
        number = waiting.pop()
        part = record.parts[number]
        if number:
            after = starts[part.parent] + part.after - record.parts[part.parent].after
            starts[number] = end
            if after != end:
                branches.append(wire.Branch(start=end, after=after))
            parts.append(part)
            end += len(part.data) // 4
        # The last one is taken first: of those that share the most, the one that comes first in the record.
        waiting += sorted(followers[number], key=lambda one: (record.parts[one].after, -one))
    return parts, branches


def _list_spans(parts: list[CallPart], engine: str) -> Iterator[wire.VersionSpan]:
    begin = 0
    for part in parts:
        sampled = begin + part.num_given
        if part.num_given:
            yield wire.VersionSpan(version=ENVIRONMENT, start=begin, end=sampled)
        where = "" if part.engine == engine else part.engine
        for span in part.spans:
            yield msgspec.structs.replace(span, start=sampled + span.start, end=sampled + span.end, engine=where)
        begin += len(part.data) // 4


def _read_log_probs(part: CallPart) -> bytes:
    """Return the log-probs of a part as they travel; 0 for tokens that the policy did not sample."""
    return bytes(4 * part.num_given) + part.log_probs


def _count_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Count the first tokens that are equal."""
    length = min(len(one), len(other))
    unequal = np.flatnonzero(one[:length] != other[:length])
    return int(unequal[0]) if len(unequal) else length


def cut_turn(turn: wire.Response, length: int) -> wire.Response:
    """Return a turn without the tokens after the first `length`, if it has more."""
    if len(turn.tokens) <= 4 * length:
        return turn
    spans = [msgspec.structs.replace(span, end=min(span.end, length)) for span in turn.spans if span.start < length]
    return msgspec.structs.replace(
        turn,
        tokens=turn.tokens[: 4 * length],
        log_probs=turn.log_probs[: 4 * length],
        finish_reason="length",
        spans=spans,
    )
