"""Chats as their template writes them, turn after turn, so that a text that was written stays as it is.

A chat template writes whole chats, and may write an earlier message otherwise once a later one follows. A conversation
that is trained on only grows. Its prompt is the chat up to the end of the last message's content. Each turn of the
environment is what the template writes between two turns of the policy.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron_rl.errors import InputError

JSON = dict[str, Any]

# A marker for a text, which no template writes by itself.
_MARK = "megatronrl0text"


@dataclasses.dataclass(frozen=True)
class ChatWriter:
    """Writes the turns of conversations with a tokenizer's chat template."""

    tokenizer: Any

    def write_prompt(self, messages: Sequence[JSON]) -> tuple[str, str]:
        """Write a chat; return it up to the end of the last message's content, and from there to the policy's turn."""
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": str(last["content"]) + _MARK}]
        before, found, after = self._render(marked).rpartition(_MARK)
        if not found:
            raise InputError("the chat template does not write the last message as it is")
        return before, after

    def write_turn(self, messages: Sequence[JSON]) -> str:
        """Write what stands between the text of a turn of the policy and its next turn: the end of its turn first."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}, *messages]
        _, found, after = self._render(chat).rpartition(_MARK)
        if not found:
            raise InputError("the chat template does not write a turn of the assistant as it is")
        return after

    def _render(self, messages: Sequence[JSON]) -> str:
        rendered: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return rendered
