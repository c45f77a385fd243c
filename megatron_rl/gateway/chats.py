"""Chats and conversations as tokens: what is written around turns of the policy, whose own tokens stay as they are."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from jinja2 import TemplateError

from megatron_rl.errors import InputError
from megatron_rl.gateway.said import write_calls
from megatron_rl.shared.chat import ChatWriter, read_tokenizer
from megatron_rl.shared.protocol import wire
from megatron_rl.tool_calls import JSON, Said, ToolCall

# The most tokens that end a turn.
_LONGEST_END = 8


class ChatTooLong(Exception):
    """A chat that has more tokens than it may have."""


class Chats(Protocol):
    """The texts and tokens of an agent's chats; those that surely have more than `most` tokens raise ChatTooLong."""

    num_tokens: int | None
    """The number of token ids; None if it is not known."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode(self, text: str, *, most: int) -> list[int]:
        """Return the tokens of a plain text."""

    def render(self, messages: Sequence[JSON], tools: Sequence[JSON], *, most: int) -> list[int]:
        """Return the tokens of a whole chat, up to the policy's turn; raise InputError if it cannot be written."""

    def extend(
        self, messages: Sequence[JSON], tools: Sequence[JSON], said: Sequence[int], calls: Sequence[JSON], *, most: int
    ) -> list[int]:
        """Return what stands between a turn and the next one: messages, in their frame.

        `said` are the tokens of the chat up to the turn's end, and `calls` are the turn's calls of tools.
        """


class TemplateChats:
    """The chats of a model, an agent's or an environment's.

    Its chat template writes them, and its tokenizer makes tokens of them. Plain text stands as it is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatWriter(tokenizer)
        # In characters. A token of a byte-level vocabulary has one for each byte, so it is not shorter than its text.
        vocabulary = tokenizer.get_vocab()
        self._longest = max(map(len, vocabulary))
        self.num_tokens: int | None = 1 + max(vocabulary.values())
        self._tools: tuple[JSON, ...] = ()

    @classmethod
    def load(cls, folder: str) -> Self:
        return cls(read_tokenizer(folder))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def encode(self, text: str, *, most: int) -> list[int]:
        return self._encode(most, text)

    def render(self, messages: Sequence[JSON], tools: Sequence[JSON], *, most: int) -> list[int]:
        def write() -> list[int]:
            self._chat.check_tools(tools)
            # The two parts are tokenized apart, as the prompts of rows are.
            return self._encode(most, *self._chat.write_prompt(messages, tools))

        return _write(write)

    def extend(
        self, messages: Sequence[JSON], tools: Sequence[JSON], said: Sequence[int], calls: Sequence[JSON], *, most: int
    ) -> list[int]:
        tokens = _write(lambda: self._encode(most, self._chat.write_turn(messages, tools, calls or None)))
        # The policy ends its turn itself, with the tokens that the template would write.
        num_said = max((num for num in range(1, _LONGEST_END) if tokens[:num] == list(said[-num:])), default=0)
        return tokens[num_said:]

    @property
    def template(self) -> str:
        """The chat template; empty without one."""
        return str(self._tokenizer.chat_template or "")

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        """Return the tokens between the prompt and the policy's first turn: what the environment says first."""
        if isinstance(prompt.text, str):
            return self._encode(sys.maxsize, said or "")
        _, after = self._chat.write_prompt(prompt.text, self._tools)
        return self._encode(sys.maxsize, (said or "") + after)

    def follow(
        self, prompt: wire.Prompt, messages: Sequence[JSON], turn: Sequence[int], calls: Sequence[ToolCall]
    ) -> list[int]:
        """Return the tokens of messages after a turn, up to the next turn; `calls` are the turn's calls of tools."""
        if isinstance(prompt.text, str):
            return self._encode(sys.maxsize, *(message["content"] for message in messages))
        return self.extend(messages, self._tools, turn, write_calls(calls), most=sys.maxsize)

    def offer(self, tools: Sequence[JSON]) -> None:
        """Offer these tools to the policy from now on; raise an InputError if the model cannot be told of them."""
        self._tools = tuple(tools)
        if tools:
            # The template's own errors are many.
            try:
                self._chat.check_tools(self._tools)
                self._chat.write_turn([{"role": "tool", "content": "?"}], self._tools)
            except Exception as error:
                raise InputError(
                    f"the chat template of --hf-model cannot write calls of tools: {error}; take a model whose "
                    "template has them"
                ) from None

    def check_prompt(self, prompt: wire.Prompt) -> None:
        """Raise an InputError unless the prompt's tokens tell the policy of the tools."""
        if not self._tools:
            return
        if isinstance(prompt.text, str):
            raise InputError(f"prompt {prompt.index} is plain text, and tools need a chat: add --prompt-chat")
        if (
            self._encode(sys.maxsize, self._chat.write_prompt(prompt.text, self._tools)[0])
            != wire.decode_tokens(prompt.tokens).tolist()
        ):
            raise InputError(
                f"prompt {prompt.index} does not have the tools that the sidecar's environment offers: give trainer "
                "and sidecar the same file for --rollout-env, and the same tokenizer"
            )

    def _encode(self, most: int, *texts: str) -> list[int]:
        # Counted before it is tokenized, which takes seconds for a few MiB.
        if sum(len(text) for text in texts) > most * self._longest:
            raise ChatTooLong
        return [int(token) for text in texts for token in self._tokenizer.encode(text, add_special_tokens=False)]


class NumberChats:
    """The chats of scripted engines, which have no tokenizer: the numbers in their messages are their tokens."""

    num_tokens: int | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def encode(self, text: str, *, most: int) -> list[int]:
        return self.render([{"content": text}], (), most=most)

    def render(self, messages: Sequence[JSON], tools: Sequence[JSON], *, most: int) -> list[int]:
        texts = [str(message["content"]) for message in messages]
        words = [word for text in texts for word in text.split()]
        if wrong := [word for word in words if not word.isdigit()]:
            raise InputError(f"a scripted engine reads numbers alone, and {wrong[0]!r} is none")
        return [*range(2, 2 + len(tools)), *map(int, words)]

    def extend(
        self, messages: Sequence[JSON], tools: Sequence[JSON], said: Sequence[int], calls: Sequence[JSON], *, most: int
    ) -> list[int]:
        return self.render(messages, (), most=most)

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        return [int(word) for word in (said or "").split()]

    def follow(
        self, prompt: wire.Prompt, messages: Sequence[JSON], turn: Sequence[int], calls: Sequence[ToolCall]
    ) -> list[int]:
        # The length of a word of an error stands for it.
        words = " ".join(str(message["content"]) for message in messages).split()
        return [int(word) if word.isdecimal() else len(word) for word in words]

    def offer(self, tools: Sequence[JSON]) -> None:
        pass

    def check_prompt(self, prompt: wire.Prompt) -> None:
        pass


def _write(write: Callable[[], list[int]]) -> list[int]:
    """Write with a template, which is a program of the model's own."""
    try:
        return write()
    except (TemplateError, InputError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"the chat template does not write these messages: {error}") from None


def write_results(calls: Sequence[ToolCall], results: Sequence[str]) -> list[JSON]:
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


class NumberReader:
    """Reads calls of tools in the tokens of scripted engines.

    The first token chooses a tool, or none, and those after it are its arguments.
    """

    async def read(self, tokens: Sequence[int], text: str, tools: Sequence[JSON]) -> Said:
        number = tokens[0] % (len(tools) + 1)
        if number == len(tools):
            return Said(text, None, ())
        function = tools[number]["function"]
        arguments = dict(zip(function["parameters"]["properties"], tokens[1:], strict=False))
        return Said("", None, (ToolCall(f"call{number}", function["name"], json.dumps(arguments)),))
