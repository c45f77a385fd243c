"""A gateway for requests that a fuzzer draws: each has a rollout of its own. And the schema that it draws from."""

import asyncio
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from megatron_rl.gateway.application import build_gateway_application
from megatron_rl.gateway.chats import TemplateChats
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import Terms, TurnRequest
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.serving import find_url, open_listener, serve
from megatron_rl.tool_calls import Said, ToolCall
from tests import chat_models
from tests.turns import make_turn


class ToolCaller:
    """A reader that finds a call of the first tool."""

    async def read(self, tokens, text: str, tools) -> Said:
        calls = tuple(ToolCall("call-1", one["function"]["name"], "{}") for one in tools[:1])
        return Said(text, "a thought", calls)


class FuzzedGateway(logging.Handler):
    """A gateway on a port of its own, in the thread that calls `run`. As a handler, it notes what is reported."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        chat_models.save_tokenizer(folder, chat_models.HERMES, "<|im_end|>")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._gateway = Gateway(TemplateChats(self._tokenizer), ToolCaller(), reads_tools=True, advises=True)
        self._application = build_gateway_application(self._gateway)
        self._ended = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self.is_up = threading.Event()
        self.url = ""
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.faults.append(record.getMessage())

    def run(self) -> None:
        listener = open_listener("127.0.0.1", 0)
        self.url = find_url(listener)
        loggers = [logging.getLogger(name) for name in ("megatron_rl", "uvicorn.error")]
        for logger in loggers:
            logger.addHandler(self)
        self._loop.call_soon(self.is_up.set)
        self._loop.run_until_complete(serve(self._open_one, listener=listener, until=self._ended))
        for logger in loggers:
            logger.removeHandler(self)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)

    async def _open_one(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request in a rollout that no other request has ended."""
        prompt = np.asarray(self._tokenizer.encode("<|im_start|>user\n2 + 3"), dtype="<i4")

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.statuses[scope["path"], message["status"]] += 1
            await send(message)

        terms = Terms(prompt, 5, wire.Sampling(max_tokens=4096, max_turns=1000, temperature=1.0))
        with self._gateway.open(terms, self._sample) as (key, _):
            headers = [pair for pair in scope.get("headers", ()) if pair[0] not in (b"authorization", b"x-api-key")]
            headers.append((b"authorization", f"Bearer {key}".encode()))
            await self._application({**scope, "headers": headers}, receive, note)

    async def _sample(self, request: TurnRequest) -> wire.Response:
        tokens = [*self._tokenizer.encode("it is 5"), chat_models.find("<|im_end|>")][: request.max_tokens]
        reason = "stop" if len(tokens) > 2 and tokens[-1] == chat_models.find("<|im_end|>") else "length"
        return make_turn(tokens, -0.5, seed=request.seed, finish_reason=reason)


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


TEXT: dict[str, Any] = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT, "maxItems": 3}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 1, "maximum": 300}
ANY: dict[str, Any] = {}
NULL = {"type": "null"}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": 4}


def _any(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*kinds]}


def _one(*values: Any) -> dict[str, Any]:
    return {"enum": [*values]}


FUNCTION = _object("name", name=TEXT, description=TEXT, parameters={"type": "object"})
CHOICE = _any(_one("auto", "none", "required", "any"), _object("type", type=TEXT, name=TEXT, function=FUNCTION))
FORMAT = _object(
    "type", type=_one("text", "json_object", "json_schema"), json_schema=_object("", schema=ANY), schema=ANY
)
COMMON = {
    "model": _one("policy"), "stream": FLAG, "temperature": _one(1, 1.0, 0.5, None), "top_p": _one(1, 0.5),
    "metadata": {"type": "object"}, "user": TEXT,
}  # fmt: skip
PART = _object("type text", type=_one("text", "input_text", "output_text", "image_url"), text=TEXT)
CONTENT = _any(TEXT, _list(PART), NULL)
CALL = _object("function", id=TEXT, type=_one("function"), function=_object("name", name=TEXT, arguments=TEXT))
MESSAGE = _object(
    "role content", role=_one("system", "developer", "user", "assistant", "tool"), content=CONTENT, name=TEXT,
    tool_calls=_list(CALL), tool_call_id=TEXT, reasoning_content=TEXT,
)  # fmt: skip
TOOL = _object("type function", type=_one("function"), function=FUNCTION)
OPTIONS = _object("", include_usage=FLAG)
CHAT = _object(
    "model messages", **COMMON, messages=_list(MESSAGE), tools=_list(TOOL), tool_choice=CHOICE, max_tokens=COUNT,
    max_completion_tokens=COUNT, stream_options=OPTIONS, logprobs=FLAG, top_logprobs=COUNT, stop=_any(TEXT, TEXTS),
    n=COUNT, response_format=FORMAT, parallel_tool_calls=FLAG, logit_bias={"type": "object"}, seed=COUNT,
)  # fmt: skip
TOKEN = {"type": "integer", "minimum": 0, "maximum": 400}
COMPLETION = _object(
    "model prompt", **COMMON, prompt=_any(TEXT, _list(TOKEN), _list(TEXT), _list(_list(TOKEN))), max_tokens=COUNT,
    stream_options=OPTIONS, logprobs=COUNT, stop=_any(TEXT, TEXTS), n=COUNT, echo=FLAG, best_of=COUNT, suffix=TEXT,
)  # fmt: skip
ITEM = _object(
    "", type=_one("message", "function_call", "function_call_output", "reasoning"), role=MESSAGE["properties"]["role"],
    content=CONTENT, output=CONTENT, call_id=TEXT, name=TEXT, arguments=TEXT, id=TEXT, summary=_list(PART),
)  # fmt: skip
RESPONSE = _object(
    "model input", **COMMON, input=_any(TEXT, _list(ITEM)), instructions=TEXT, max_output_tokens=COUNT, store=FLAG,
    tools=_list(_object("type name", type=_one("function", "web_search"), **FUNCTION["properties"])),
    tool_choice=CHOICE,
    text=_object("", format=FORMAT, verbosity=TEXT), reasoning=_object("", effort=TEXT), include=TEXTS,
    parallel_tool_calls=FLAG, previous_response_id=TEXT, truncation=_one("auto", "disabled"), background=FLAG,
)  # fmt: skip
BLOCK = _object(
    "type", type=_one("text", "tool_use", "tool_result", "thinking", "redacted_thinking"), text=TEXT, id=TEXT,
    name=TEXT, input={"type": "object"}, tool_use_id=TEXT, content=_any(TEXT, _list(PART)), thinking=TEXT,
    signature=TEXT, is_error=FLAG,
)  # fmt: skip
ANTHROPIC = _object(
    "model messages max_tokens", **COMMON, max_tokens=COUNT, system=_any(TEXT, _list(PART)), tool_choice=CHOICE,
    messages=_list(_object("role content", role=_one("user", "assistant"), content=_any(TEXT, _list(BLOCK)))),
    tools=_list(_object("name input_schema", name=TEXT, description=TEXT, input_schema={"type": "object"})),
    stop_sequences=TEXTS, thinking=_object("type", type=_one("enabled", "disabled", "adaptive"), budget_tokens=COUNT),
    output_config=_object("", effort=TEXT, format=FORMAT),
)  # fmt: skip
ANSWER = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": ANY}}
REFUSED = {"application/json": {"schema": _object("error", error=_object("message type", message=TEXT, type=TEXT))}}


def _operation(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "post": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
            "responses": {
                "200": {"description": "answered", "content": ANSWER},
                "default": {"description": "refused", "content": REFUSED},
            },
        }
    }


SCHEMA: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "The gateway", "version": "1"},
    "paths": {
        "/v1/chat/completions": _operation(CHAT),
        "/v1/completions": _operation(COMPLETION),
        "/v1/responses": _operation(RESPONSE),
        "/v1/messages": _operation(ANTHROPIC),
        "/v1/messages/count_tokens": _operation(ANTHROPIC),
    },
}
