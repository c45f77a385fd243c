"""The texts of conversations: tokens of what an environment says, and texts of what the policy sampled."""

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_rl.shared.chat import ChatWriter
from megatron_rl.shared.protocol import wire


class Texts(Protocol):
    """The texts and tokens of conversations."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the policy's tokens."""

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        """Return the tokens between the prompt and the policy's first turn: what the environment says first."""

    def reply(self, prompt: wire.Prompt, said: str, last: int) -> list[int]:
        """Return the tokens of what the environment says to a turn whose last token is `last`, up to the next turn."""


class TokenizerTexts:
    """The texts of a model's tokenizer: a chat's are written by its template, and plain text stands as it is."""

    def __init__(self, folder: str) -> None:
        # Imported here: it takes a second, and scripted rehearsals do not need it.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._chat = ChatWriter(self._tokenizer)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        if isinstance(prompt.text, str):
            return self._encode(said or "")
        _, after = self._chat.write_prompt(prompt.text)
        return self._encode((said or "") + after)

    def reply(self, prompt: wire.Prompt, said: str, last: int) -> list[int]:
        if isinstance(prompt.text, str):
            return self._encode(said)
        tokens = self._encode(self._chat.write_turn([{"role": "user", "content": said}]))
        # The policy ends its turn itself, with the token that the template would write.
        return tokens[1:] if tokens[:1] == [last] else tokens

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


class NumberTexts:
    """The texts of scripted engines, which have no tokenizer: tokens as numbers."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        return self._encode(said or "")

    def reply(self, prompt: wire.Prompt, said: str, last: int) -> list[int]:
        return self._encode(said)

    def _encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]
