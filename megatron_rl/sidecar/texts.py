"""The texts of conversations: tokens of what an environment says, and texts of what the policy sampled."""

import json
import sys
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.errors import InputError
from megatron_rl.gateway.chats import TemplateChats
from megatron_rl.gateway.said import write_calls
from megatron_rl.shared.protocol import wire
from megatron_rl.tool_calls import JSON, Said, ToolCall


class Texts(Protocol):
    """The texts and tokens of conversations."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the policy's tokens."""

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        """Return the tokens between the prompt and the policy's first turn: what the environment says first."""

    def follow(
        self, prompt: wire.Prompt, messages: Sequence[JSON], turn: Sequence[int], calls: Sequence[ToolCall]
    ) -> list[int]:
        """Return the tokens of messages after a turn, up to the next turn; `calls` are the turn's calls of tools."""

    def offer(self, tools: Sequence[JSON]) -> None:
        """Offer these tools to the policy from now on; raise an InputError if the model cannot be told of them."""

    def check_prompt(self, prompt: wire.Prompt) -> None:
        """Raise an InputError unless the prompt's tokens tell the policy of the tools."""


class TokenizerTexts(TemplateChats):
    """The texts of a model's tokenizer: a chat's are written by its template, and plain text stands as it is."""

    _tools: tuple[JSON, ...] = ()

    @property
    def template(self) -> str:
        """The chat template; empty without one."""
        return str(self._tokenizer.chat_template or "")

    def open(self, prompt: wire.Prompt, said: str | None) -> list[int]:
        if isinstance(prompt.text, str):
            return self._encode(sys.maxsize, said or "")
        _, after = self._chat.write_prompt(prompt.text, self._tools)
        return self._encode(sys.maxsize, (said or "") + after)

    def follow(
        self, prompt: wire.Prompt, messages: Sequence[JSON], turn: Sequence[int], calls: Sequence[ToolCall]
    ) -> list[int]:
        if isinstance(prompt.text, str):
            return self._encode(sys.maxsize, *(message["content"] for message in messages))
        return self.extend(messages, self._tools, turn, write_calls(calls), most=sys.maxsize)

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
            self._encode(sys.maxsize, self._chat.write_prompt(prompt.text, self._tools)[0])
            != wire.decode_tokens(prompt.tokens).tolist()
        ):
            raise InputError(
                f"prompt {prompt.index} does not have the tools that the sidecar's environment offers: give trainer "
                "and sidecar the same file for --rollout-env, and the same tokenizer"
            )


def write_results(calls: Sequence[ToolCall], results: Sequence[str]) -> list[JSON]:
    """Write the results of calls as messages of a chat."""
    return [
        {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, results, strict=True)
    ]


class NumberTexts:
    """The texts of scripted engines, which have no tokenizer: tokens as numbers."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

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
