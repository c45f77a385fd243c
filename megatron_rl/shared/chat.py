"""Chats as their template writes them, turn after turn, so that a text that was written stays as it is.

A chat template writes whole chats, and may write an earlier message otherwise once a later one follows. A conversation
that is trained on only grows. Its prompt is the chat up to the end of the last message's content. Each turn of the
environment is what the template writes between two turns of the policy.
"""

import dataclasses
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.errors import InputError

JSON = dict[str, Any]
Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Function that returns the texts of sequences of tokens."""

_ASKED: JSON = {"role": "user", "content": "?"}
# The name of a tool in a call that stands for one whose name is not known.
_ANY_TOOL = "tool"
_importing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class ChatWriter:
    """Writes the turns of conversations with a tokenizer's chat template.

    Messages are OpenAI's: those of role `tool` have results of tools, and an assistant's may have `tool_calls`. `tools`
    are the schemas of the tools that the policy may call.
    """

    tokenizer: Any
    mark: str = dataclasses.field(default_factory=lambda: f"megatronrl{secrets.token_hex(8)}text")
    """A marker for a text. It is drawn, so that no template, page or policy writes it."""

    @property
    def _said(self) -> tuple[JSON, ...]:
        """A chat whose last turn is the marker."""
        return _ASKED, {"role": "assistant", "content": self.mark}

    def write_prompt(self, messages: Sequence[JSON], tools: Sequence[JSON] = ()) -> tuple[str, str]:
        """Write a chat; return it up to the end of the last message's content, and from there to the policy's turn."""
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": str(last["content"]) + self.mark}]
        before, found, after = self._render(marked, tools).rpartition(self.mark)
        if not found:
            raise InputError("the chat template does not write the last message as it is")
        return before, after

    def check_tools(self, tools: Sequence[JSON]) -> None:
        """Raise an InputError if the template leaves tools out."""
        if tools and self._render(self._said, tools) == self._render(self._said, ()):
            raise InputError("it does not write the tools that are offered")

    def write_turn(
        self, messages: Sequence[JSON], tools: Sequence[JSON] = (), calls: Sequence[JSON] | None = None
    ) -> str:
        """Write what stands between the text of a turn of the policy and its next turn: the end of its turn first.

        `calls` are the calls of tools in that turn, as OpenAI's `tool_calls`. By default each message of role `tool`
        has one, with its `name` and `tool_call_id`.
        """
        if calls is None:
            calls = [_stand_in(message, tools) for message in messages if message["role"] == "tool"]
        if calls:
            return self._write_results(messages, tools, calls)
        _, found, after = self._render([*self._said, *messages], tools).rpartition(self.mark)
        if not found:
            raise InputError("the chat template does not write a turn of the assistant as it is")
        return after

    def _write_results(self, messages: Sequence[JSON], tools: Sequence[JSON], calls: Sequence[JSON]) -> str:
        marked = [_set_arguments(call, {"text": self.mark}) for call in calls]
        said: list[JSON] = [_ASKED, {"role": "assistant", "content": "", "tool_calls": marked}]
        try:
            _, found, turn = self._render(said, tools, is_open=False).rpartition(self.mark)
            _, _, whole = self._render([*said, *messages], tools).rpartition(self.mark)
        # A template is a program with errors of its own: some refuse several calls in a turn, but not their results.
        except Exception:
            if len(calls) == 1:
                raise
            return self._write_results(messages, tools, calls[:1])
        if not found:
            raise InputError("the chat template does not write calls of tools")
        if not whole.startswith(turn):
            raise InputError("the chat template writes a call of a tool otherwise once its result follows")
        return self._find_end(turn, tools) + whole[len(turn) :]

    def _find_end(self, turn: str, tools: Sequence[JSON]) -> str:
        """Return the end of a turn that calls tools, with which the text after its last argument ends."""
        _, found, end = self._render(self._said, tools, is_open=False).rpartition(self.mark)
        if found and turn.endswith(end):
            return end
        # Another token ends a turn with a call.
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        place = max((turn.rfind(token) for token in (*self.tokenizer.all_special_tokens, *added)), default=-1)
        if place < 0:
            raise InputError("the chat template ends a turn that calls a tool without a special token")
        return turn[place:]

    def _render(self, messages: Sequence[JSON], tools: Sequence[JSON], is_open: bool = True) -> str:
        try:
            return self._apply([_spell(message) for message in messages], tools, is_open)
        except TypeError:
            # Some templates read the arguments of calls as text.
            return self._apply([_spell(message, is_text=True) for message in messages], tools, is_open)

    def _apply(self, messages: Sequence[JSON], tools: Sequence[JSON], is_open: bool) -> str:
        # Some templates write a frame for tools around an empty list.
        rendered: str = self.tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=is_open
        )
        return rendered


def _stand_in(message: JSON, tools: Sequence[JSON]) -> JSON:
    """Make a call for a result without one."""
    names = [message.get("name"), *[tool["function"]["name"] for tool in tools], _ANY_TOOL]
    name = next(name for name in names if name)
    return {"id": message.get("tool_call_id", ""), "type": "function", "function": {"name": name, "arguments": {}}}


def _spell(message: JSON, is_text: bool = False) -> JSON:
    """Write a message as templates read it: content is text, and the arguments of calls are objects, or text."""
    if not message.get("tool_calls"):
        return message
    calls = [_set_arguments(call, _read_arguments(call["function"]["arguments"])) for call in message["tool_calls"]]
    if is_text:
        calls = [_set_arguments(call, json.dumps(call["function"]["arguments"])) for call in calls]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _set_arguments(call: JSON, arguments: Any) -> JSON:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _read_arguments(arguments: Any) -> Any:
    """Read arguments that are a JSON object as text; others stay as they are."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def read_tokenizer(folder: str) -> Any:
    """Load the tokenizer of a checkpoint.

    The import takes a second, and scripted rehearsals do not need it. One thread makes it at a time: transformers
    replaces its module at the end, and a thread that waits for another's import would get the first one, without names.
    """
    with _importing:
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def build_decoder(folder: str) -> Decode:
    """Build a decoder from the tokenizer of a checkpoint; it leaves out special tokens."""
    tokenizer = read_tokenizer(folder)

    def decode(sequences: Sequence[Sequence[int]]) -> list[str]:
        return list(tokenizer.batch_decode(sequences, skip_special_tokens=True))

    return decode
