"""Calls of clients and answers of the policy, whichever interface they speak."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.errors import MegatronRLError
from megatron_rl.tool_calls import JSON, Said, ToolCall

MODEL = "policy"
"""The name under which the policy is served."""
# Of the digests of an answer's parts as they were sent, and the number of parts.
_EXACT_BYTES = 8
_NUM_PARTS = 3
_NO_PART = b"\0"


@dataclasses.dataclass(frozen=True)
class Advice:
    """A request of a client that would change the sampled policy; with --rollout-gateway-advise it is advice."""

    parameter: str
    text: str = ""
    """The words that are added to the last message; none for what words cannot ask for."""
    is_followed: Callable[[Said], bool] = lambda said: False


@dataclasses.dataclass(frozen=True)
class Serving:
    """The terms on which a call is read."""

    temperature: float
    advises: bool = False
    """True: a request that would change the policy is advice."""
    recall: Callable[[str], list[JSON] | None] = lambda name: None
    """Function that returns the chat of an earlier answer of the rollout, by its id."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A client's request for a turn."""

    messages: list[JSON]
    """The chat, in OpenAI's form; contents are text."""
    tools: list[JSON]
    max_tokens: int | None
    is_streamed: bool = False
    has_usage: bool = True
    """True if a streamed answer ends with the numbers of tokens."""
    has_log_probs: bool = False
    prompt: str | list[int] | None = None
    """A text or token ids that are continued, in place of a chat."""
    stop: tuple[str, ...] = ()
    """Texts before which the answer ends."""
    num_answers: int = 1
    advice: tuple[Advice, ...] = ()
    num_instructions: int | None = None
    """The first messages that later calls do not take over; None if the answer is not asked for later."""
    settings: JSON = dataclasses.field(default_factory=dict)
    """Fields of the request that the answer repeats."""

    def write_messages(self) -> list[JSON]:
        """Return the chat as the policy reads it: with the advice at its end."""
        texts = [advice.text for advice in self.advice if advice.text]
        if not texts:
            return self.messages
        last = self.messages[-1]
        return [*self.messages[:-1], {**last, "content": "\n\n".join(filter(None, [last["content"], *texts]))}]

    @functools.cached_property
    def digests(self) -> "ChatDigests":
        return ChatDigests(self.messages, self.tools)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A turn as a client hears it."""

    id: str
    said: Said
    is_cut: bool
    """True if no token was left."""
    num_prompt_tokens: int
    tokens: list[int]
    log_probs: list[float]
    texts: list[str]
    """The text of each token, if log-probs were asked for."""
    stopped_by: str | None = None
    """The text of `Call.stop` that it ends before."""


class CallRefused(MegatronRLError):
    def __init__(self, reason: str, status: int = 400, code: str = "refused", parameter: str | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        self.parameter = parameter
        """The part of the request that is the reason."""


class CallUnreadable(CallRefused):
    """A call that ends its rollout: its body cannot be read."""


class ChatDigests:
    """Digests of a chat, which tell it from others once its messages are gone.

    Clients change answers before they send them back: they leave reasoning out, strip white space, and write the
    arguments of calls otherwise. Some drop the text of an answer that has calls. Chats that differ in this alone have
    equal digests in `ends`; chats with other texts of such answers do too, and `may_extend` tells them apart.
    """

    def __init__(self, messages: Sequence[JSON], tools: Sequence[JSON]) -> None:
        self._digest = hashlib.blake2b(_dump(list(tools)), digest_size=16)
        self.ends: list[bytes] = []
        """A digest of the chat up to each message."""
        self._exact = bytearray()
        for message in messages:
            self.add(message)

    def copy(self) -> "ChatDigests":
        """Return digests of the same chat that can be continued by themselves."""
        copied = ChatDigests((), ())
        copied._digest, copied.ends, copied._exact = self._digest.copy(), [*self.ends], self._exact[:]
        return copied

    def add(self, message: JSON) -> None:
        self._digest.update(_dump(simplify_message(message)))
        self.ends.append(self._digest.digest())
        # Messages of others have nothing that a client may change.
        if message["role"] == "assistant":
            for part in get_exact(message):
                digest = hashlib.blake2b(json.dumps(part).encode(), digest_size=_EXACT_BYTES).digest()
                self._exact += b"\1" + digest if part else _NO_PART

    @property
    def exact(self) -> bytes:
        """Digests of the parts of all answers as they were sent, in their order."""
        return bytes(self._exact)

    def count_equal(self, exact: bytes) -> int:
        """Count the parts of answers that are equal to a chat's that this one extends, as both were sent."""
        return sum(part == other for part, other in zip(_divide(exact), _divide(self._exact), strict=False))

    def may_extend(self, exact: bytes) -> bool:
        """Check that each text of an answer is a chat's own, or is missing while the ids of its calls are the same."""
        others = _divide(exact)
        parts = _divide(self._exact)[: len(others)]
        texts, ids = slice(0, None, _NUM_PARTS), slice(1, None, _NUM_PARTS)
        return all(
            text == other or (text == _NO_PART != own_ids and own_ids == other_ids)
            for text, other, own_ids, other_ids in zip(
                parts[texts], others[texts], parts[ids], others[ids], strict=True
            )
        )


def _divide(exact: bytes | bytearray) -> list[bytes]:
    """Divide the digests of parts: each begins with 1, and a part that an answer lacks is 0 alone."""
    parts, place = [], 0
    while place < len(exact):
        end = place + 1 + exact[place] * _EXACT_BYTES
        parts.append(bytes(exact[place:end]))
        place = end
    return parts


def simplify_message(message: JSON) -> list[Any]:
    """Return what of a message tells it from others."""
    role, content = message["role"], message["content"]
    if role == "assistant":
        calls = [call["function"] for call in message.get("tool_calls", ())]
        content = None if calls else content.strip()
        return [role, content, [[call["name"], _read(call["arguments"])] for call in calls]]
    return [role, content, message.get("name"), message.get("tool_call_id")]


def get_exact(message: JSON) -> tuple[Any, ...]:
    """Return what clients may change of an answer: text, ids of calls, and the rest; white space around texts too."""
    calls = message.get("tool_calls", ())
    rest = message["content"], message.get("reasoning_content"), [call["function"]["arguments"] for call in calls]
    return message["content"].strip() if calls else "", [call.get("id") for call in calls], rest


def write_said(said: Said) -> JSON:
    message: JSON = {"role": "assistant", "content": said.content}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = write_calls(said.tool_calls)
    return message


def write_calls(calls: Sequence[ToolCall]) -> list[JSON]:
    """Write calls of tools as a message of a chat has them."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
