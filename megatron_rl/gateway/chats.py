"""Chats as tokens: whole ones, and what follows a turn of the policy, whose own tokens stay as they are."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from jinja2 import TemplateError

from megatron_rl.errors import InputError
from megatron_rl.shared.chat import ChatWriter
from megatron_rl.tool_calls import JSON

# The most tokens that end a turn.
_LONGEST_END = 8


class ChatTooLong(Exception):
    """A chat that has more tokens than it may have."""


class Chats(Protocol):
    """The texts and tokens of chats; those that surely have more than `most` tokens raise ChatTooLong."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""

    def render(self, messages: Sequence[JSON], tools: Sequence[JSON], *, most: int) -> list[int]:
        """Return the tokens of a whole chat, up to the policy's turn; raise InputError if it cannot be written."""

    def extend(
        self, messages: Sequence[JSON], tools: Sequence[JSON], said: Sequence[int], calls: Sequence[JSON], *, most: int
    ) -> list[int]:
        """Return what stands between a turn and the next one: messages, in their frame.

        `said` are the tokens of the chat up to the turn's end, and `calls` are the turn's calls of tools.
        """


class TemplateChats:
    """The chats of a model: its chat template writes them, its tokenizer makes tokens of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._chat = ChatWriter(tokenizer)
        # In characters. A token of a byte-level vocabulary has one for each byte, so it is not shorter than its text.
        self._longest = max(map(len, tokenizer.get_vocab()))

    @classmethod
    def load(cls, folder: str) -> Self:
        """Load the tokenizer of a checkpoint."""
        # Imported here: it takes a second, and scripted rehearsals do not need it.
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(folder))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

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

    def _encode(self, most: int, *texts: str) -> list[int]:
        # Counted before it is tokenized, which takes seconds for a few MiB.
        if sum(len(text) for text in texts) > most * self._longest:
            raise ChatTooLong
        return [int(token) for text in texts for token in self._tokenizer.encode(text, add_special_tokens=False)]


class NumberChats:
    """The chats of scripted engines, which have no tokenizer: the numbers in their messages are their tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

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


def _write(write: Callable[[], list[int]]) -> list[int]:
    """Write with a template, which is a program of the model's own."""
    try:
        return write()
    except (TemplateError, InputError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"the chat template does not write these messages: {error}") from None
