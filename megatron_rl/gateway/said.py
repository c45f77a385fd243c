"""Calls of clients and answers of the policy, whichever interface they speak."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl.errors import MegatronRLError
from megatron_rl.tool_calls.reading import JSON, Said, ToolCall


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


@dataclasses.dataclass(frozen=True)
class Answer:
    """A turn as a client hears it."""

    id: str
    model: str
    said: Said
    is_cut: bool
    """True if no token was left."""
    num_prompt_tokens: int
    tokens: list[int]
    log_probs: list[float]
    texts: list[str]
    """The text of each token, if log-probs were asked for."""


class CallRefused(MegatronRLError):
    """A call that is not served."""

    def __init__(self, reason: str, status: int = 400, code: str = "refused", parameter: str | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.code = code
        self.parameter = parameter
        """The part of the request that is the reason."""


class CallUnreadable(CallRefused):
    """A call that ends its rollout: its body cannot be read."""


def digest_chat(messages: Sequence[JSON], tools: Sequence[JSON]) -> Iterator[bytes]:
    """Yield a digest of the chat up to each message.

    Clients change answers before they send them back: they leave reasoning out, strip white space, and write the
    arguments of calls otherwise. Chats that differ in this alone have equal digests.
    """
    digest = hashlib.blake2b(_dump(list(tools)), digest_size=16)
    for message in messages:
        digest.update(_dump(simplify_message(message)))
        yield digest.digest()


def simplify_message(message: JSON) -> list[Any]:
    """Return what of a message tells it from others."""
    role, content = message["role"], message["content"]
    if role == "assistant":
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return [role, content.strip(), [[call["name"], _read(call["arguments"])] for call in calls]]
    return [role, content, message.get("name"), message.get("tool_call_id")]


def get_exact(message: JSON) -> tuple[Any, ...]:
    """Return what `simplify_message` leaves out of an answer."""
    calls = [(call.get("id"), call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning_content"), calls


def write_said(said: Said) -> JSON:
    """Write a turn as a message of a chat."""
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
