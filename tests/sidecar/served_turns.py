"""Turns as vLLM's server answers them, beside those that our parsers read.

`python -m tests.sidecar.served_turns FOLDER`: the folder has a tokenizer. Turns are a JSON list on the standard input,
each with tool parser, reasoning parser, text and tools. The last line of output has a pair for each: the message of
OpenAI's interface, and our parser's answer.
"""

import asyncio
import json
import sys
from typing import Any

from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser import ParserManager
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from megatron_rl.sidecar.vllm.parsers import TurnParser


class Server(OpenAIServingChat):
    """The part of vLLM's server that answers once a turn is sampled."""

    def __init__(self, tokenizer: Any, tool: str | None, reasoning: str | None) -> None:
        self.parser_cls = ParserManager.get_parser(tool, reasoning, tool is not None, tokenizer=tokenizer)
        self.enable_auto_tools = tool is not None
        self.response_role = "assistant"
        self.enable_log_outputs = self.enable_prompt_tokens_details = self.enable_per_request_metrics = False
        self._include_reasoning_tokens_details = False
        self.system_fingerprint = None
        self.request_logger = None


def serve(tokenizer: Any, server: Server, tokens: list[int], tools: list[Any]) -> dict[str, Any]:
    """Return vLLM's message of a turn of these tokens, the last of which ended it."""
    content: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "model": "m"}
    request = ChatCompletionRequest(**content, **({"tools": tools} if tools else {}))
    parser = server.parser_cls(tokenizer, request.tools)
    request = parser.adjust_request(request)
    sampling = request.to_sampling_params(len(tokens), {})
    core = EngineCoreRequest("1", [tokens[0]], None, sampling, None, 0.0, None, None, None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, core)
    detokenizer.update(tokens, stop_terminated=True)
    text = detokenizer.get_next_output_text(finished=True, delta=False)
    sampled = CompletionOutput(0, text, tokens, 0.0, None, finish_reason="stop")

    async def outputs() -> Any:
        yield RequestOutput("1", None, [tokens[0]], None, [sampled], finished=True)

    answer = asyncio.run(
        server.chat_completion_full_generator(
            request, outputs(), "1", "m", [], tokenizer, RequestResponseMetadata(request_id="1"), parser
        )
    )
    return answer.choices[0].message.model_dump()


def main(folder: str) -> None:
    tokenizer = get_tokenizer(folder)
    found = []
    for tool, reasoning, text, tools in json.load(sys.stdin):
        tokens = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        names = {
            "tool_parser": tool,
            "reasoning_parser": reasoning,
            "tool_flag": "--tool",
            "reasoning_flag": "--reason",
        }
        parser = TurnParser({**names, "model": folder, "ends": []})
        served = serve(tokenizer, Server(tokenizer, tool, reasoning), tokens, tools)
        found.append([served, parser.parse(tokens, tools)])
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
