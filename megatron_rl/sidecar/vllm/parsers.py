"""Reads turns with the parsers of the installed vLLM: `python -m megatron_rl.sidecar.vllm.parsers`.

Its first line is the set-up, answered with {"ready"}, or with {"refused"} and the reason. Each later line is a turn,
{"number", "tokens", "tools"}, answered with its number and {"content", "reasoning", "calls"} or {"error"}. A call is
its id, name and arguments.
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

_LONGEST_ERROR = 500
# Digits of a call's id: some templates accept ids of this length alone.
_NUM_DIGITS = 9


class ParserRefused(Exception):
    """A parser that cannot be used."""


class TurnParser:
    """Parses turns as vLLM's server does after it has sampled them."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        try:
            from vllm.parser import ParserManager
            from vllm.reasoning import ReasoningParserManager
            from vllm.tokenizers.registry import get_tokenizer
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ParserRefused(f"its vLLM has no parsers: {error}; install vLLM 0.32 or newer there") from None
        tool, reasoning = setup["tool_parser"], setup["reasoning_parser"]
        _check_name(setup["tool_flag"], tool, ToolParserManager.list_registered())
        _check_name(setup["reasoning_flag"], reasoning, ReasoningParserManager.list_registered())
        self._tokenizer: Any = get_tokenizer(setup["model"])
        added = self._tokenizer.added_tokens_decoder.items()
        special = {*self._tokenizer.all_special_ids, *(number for number, token in added if token.special)}
        self._ends = special.union(setup["ends"])
        # The parser's own faults are many: it may lack a token of the model's, for example.
        try:
            self._make: Any = ParserManager.get_parser(
                tool_parser_name=tool,
                reasoning_parser_name=reasoning,
                enable_auto_tools=tool is not None,
                model_name=setup["model"],
                tokenizer=self._tokenizer,
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise ParserRefused(f"vLLM refuses its parsers for this model: {_describe(error)}") from None
        self._has_tools = tool is not None
        self._skips_special: dict[bool, bool] = {}
        """True for turns that are read without special tokens, by whether there are tools."""

    def parse(self, tokens: Sequence[int], tools: Sequence[Any]) -> dict[str, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        content: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "model": ""}
        request = ChatCompletionRequest(**content, **({"tools": list(tools)} if tools else {}))
        parser = self._make(self._tokenizer, request.tools)
        if bool(tools) not in self._skips_special:
            # It also builds a grammar for the tools, which takes long.
            self._skips_special[bool(tools)] = parser.adjust_request(request.model_copy()).skip_special_tokens
        # As vLLM, which leaves out the token that ended the turn.
        said = list(tokens[:-1] if tokens and tokens[-1] in self._ends else tokens)
        text = self._tokenizer.decode(said, skip_special_tokens=self._skips_special[bool(tools)])
        reasoning, left, calls = parser.parse(
            text, request, enable_auto_tools=self._has_tools, model_output_token_ids=tokens
        )
        return {
            "content": left or "",
            "reasoning": reasoning,
            "calls": [
                [_name_call(call.id, text, number), call.name, call.arguments]
                for number, call in enumerate(calls or [])
            ],
        }


def _check_name(flag: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ParserRefused(f"{flag} {name} must be a parser of vLLM: write one of {', '.join(known)}")


def _name_call(given: str | None, text: str, number: int) -> str:
    """Return a call's id: the one that the policy wrote, or one that follows from the turn; vLLM draws others."""
    if given and given in text:
        return given
    return hashlib.blake2b(f"{number}\0{text}".encode()).hexdigest()[:_NUM_DIGITS]


def _describe(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_ERROR]


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are none."""

    def answer(content: Mapping[str, Any]) -> None:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()

    try:
        parser = TurnParser(json.loads(requests.readline()))
    except ParserRefused as refused:
        answer({"refused": str(refused)})
        return
    answer({"ready": True})
    while line := requests.readline():
        turn = json.loads(line)
        try:
            said = parser.parse(turn["tokens"], turn["tools"])
        except Exception as error:
            said = {"error": _describe(error)}
        answer({"number": turn["number"], **said})


def _main() -> None:
    from megatron_rl.sidecar.parent import tie

    tie()
    # vLLM writes its own lines to standard output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    _main()
