"""The texts of conversations: tokens of what an environment says, and texts of what the policy sampled."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_rl.errors import InputError
from megatron_rl.gateway.said import write_calls
from megatron_rl.shared.chat import ChatWriter
from megatron_rl.shared.protocol import wire
from megatron_rl.tool_calls import JSON, Said, ToolCall

# The most tokens that end a turn.
_LONGEST_END = 8


class Texts(Protocol):
    """The texts and tokens of conversations."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the policy's tokens."""

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        """Return the tokens between the prompt and the policy's first turn: what the environment says first."""

    def reply(self, prompt: wire.Prompt, said: str, last: int) -> list[int]:
        """Return the tokens of what the environment says to a turn whose last token is `last`, up to the next turn."""

    def answer(self, calls: Sequence[ToolCall], results: Sequence[str], tokens: Sequence[int]) -> list[int]:
        """Return the tokens of the results of calls in a turn of these tokens, up to the next turn."""

    def offer(self, tools: Sequence[JSON]) -> None:
        """Offer these tools to the policy from now on; raise an InputError if the model cannot be told of them."""

    def check_prompt(self, prompt: wire.Prompt) -> None:
        """Raise an InputError unless the prompt's tokens tell the policy of the tools."""


class TokenizerTexts:
    """The texts of a model's tokenizer: a chat's are written by its template, and plain text stands as it is."""

    def __init__(self, folder: str) -> None:
        # Imported here: it takes a second, and scripted rehearsals do not need it.
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._chat = ChatWriter(self._tokenizer)
        self._tools: tuple[JSON, ...] = ()

    @property
    def template(self) -> str:
        """The chat template; empty without one."""
        return str(self._tokenizer.chat_template or "")

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        if isinstance(prompt.text, str):
            return self._encode(said or "")
        _, after = self._chat.write_prompt(prompt.text, self._tools)
        return self._encode((said or "") + after)

    def reply(self, prompt: wire.Prompt, said: str, last: int) -> list[int]:
        if isinstance(prompt.text, str):
            return self._encode(said)
        tokens = self._encode(self._chat.write_turn([{"role": "user", "content": said}], self._tools))
        # The policy ends its turn itself, with the token that the template would write.
        return tokens[1:] if tokens[:1] == [last] else tokens

    def answer(self, calls: Sequence[ToolCall], results: Sequence[str], tokens: Sequence[int]) -> list[int]:
        messages = write_results(calls, results)
        answer = self._encode(self._chat.write_turn(messages, self._tools, write_calls(calls)))
        # The end of the policy's turn may be several tokens.
        num_said = max((num for num in range(1, _LONGEST_END) if answer[:num] == list(tokens[-num:])), default=0)
        return answer[num_said:]

    def offer(self, tools: Sequence[JSON]) -> None:
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
        if not self._tools:
            return
        if isinstance(prompt.text, str):
            raise InputError(f"prompt {prompt.index} is plain text, and tools need a chat: add --prompt-chat")
        if (
            self._encode(self._chat.write_prompt(prompt.text, self._tools)[0])
            != wire.decode_tokens(prompt.tokens).tolist()
        ):
            raise InputError(
                f"prompt {prompt.index} does not have the tools that the sidecar's environment offers: give trainer "
                "and sidecar the same file for --rollout-env, and the same tokenizer"
            )

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def write_results(calls: Sequence[ToolCall], results: Sequence[str]) -> list[JSON]:
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


class NumberTexts:
    """The texts of scripted engines, which have no tokenizer: tokens as numbers."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        return self._encode(said or "")

    def reply(self, prompt: wire.Prompt, said: str, last: int) -> list[int]:
        return self._encode(said)

    def answer(self, calls: Sequence[ToolCall], results: Sequence[str], tokens: Sequence[int]) -> list[int]:
        # Of an error, each word's length stands for it.
        words = " ".join(results).split()
        return [int(word) if word.isdecimal() else len(word) for word in words]

    def offer(self, tools: Sequence[JSON]) -> None:
        pass

    def check_prompt(self, prompt: wire.Prompt) -> None:
        pass

    def _encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


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
