"""OpenAI's chat completions: requests as calls, and answers as their clients read them."""

import json
import time
from collections.abc import Iterator
from typing import Any

from megatron_rl.gateway import fields
from megatron_rl.gateway.said import MODEL, Answer, Call, CallRefused, write_said
from megatron_rl.tool_calls import JSON

_READ = {
    "messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stream_options",
    "logprobs", "temperature",
}  # fmt: skip
# None of these changes what is sampled; seeds are the run's.
IGNORED = {
    "user", "metadata", "store", "seed", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1), "top_k": (None, -1, 0), "min_p": (None, 0), "n": (None, 1), "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0), "repetition_penalty": (None, 1), "logit_bias": (None, {}), "stop": (None, [], ""),
    "response_format": (None, {"type": "text"}), "top_logprobs": (None, 0), "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,), "modalities": (None, ["text"]), "functions": (None,), "function_call": (None,),
}  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_call(body: JSON, temperature: float) -> Call:
    """Read a request; raise CallRefused with all fields that cannot be served."""
    refusals = fields.Refusals()
    refusals.check_fields(body, _READ, IGNORED, NEUTRAL)
    refusals.read(fields.check_model, body)
    refusals.read(fields.check_temperature, body, temperature)
    options = refusals.read(fields.take, body, "stream_options", dict) or {}
    call = Call(
        messages=refusals.read(_read_messages, body),
        tools=refusals.read(_read_tools, body),
        max_tokens=refusals.read(fields.take_bound, body, "max_tokens", "max_completion_tokens"),
        is_streamed=bool(refusals.read(fields.take, body, "stream", bool)),
        has_usage=options.get("include_usage") is True,
        has_log_probs=bool(refusals.read(fields.take, body, "logprobs", bool)),
    )
    refusals.raise_all()
    return call


def _read_messages(body: JSON) -> list[JSON]:
    messages = fields.list_objects(fields.need(body, "messages", list), "messages")
    return fields.check_end([_read_message(one, f"messages[{number}].") for number, one in enumerate(messages)])


def _read_tools(body: JSON) -> list[JSON]:
    tools = fields.list_objects(fields.take(body, "tools", list) or [], "tools")
    for number, tool in enumerate(tools):
        place = f"tools[{number}]."
        if tool.get("type") != "function":
            raise CallRefused(f"{place}type must be 'function', and is {tool.get('type')!r}", parameter="tools")
        fields.need(fields.need(tool, "function", dict, place), "name", str, f"{place}function.")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise CallRefused(
            f"tool_choice {choice!r} would force what the policy says: leave it out, or write 'auto' or 'none'",
            parameter="tool_choice",
        )
    return [] if choice == "none" else tools


def _read_message(message: JSON, place: str) -> JSON:
    role = fields.need(message, "role", str, place)
    if role not in _ROLES:
        raise CallRefused(f"{place}role {role!r} must be one of {', '.join(_ROLES)}", parameter="messages")
    content = fields.read_text(message.get("content"), f"{place}content", "\n", "parts") or ""
    read: JSON = {"role": _ROLES[role], "content": content}
    if name := fields.take(message, "name", str, place):
        read["name"] = name
    if role == "tool":
        read["tool_call_id"] = fields.need(message, "tool_call_id", str, place)
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            read["reasoning_content"] = reasoning
        calls = fields.list_objects(fields.take(message, "tool_calls", list, place) or [], f"{place}tool_calls")
        if calls:
            read["tool_calls"] = [_read_tool_call(one, f"{place}tool_calls[{at}].") for at, one in enumerate(calls)]
    return read


def _read_tool_call(call: JSON, place: str) -> JSON:
    function = fields.need(call, "function", dict, place)
    name = fields.need(function, "name", str, f"{place}function.")
    arguments = fields.take(function, "arguments", str, f"{place}function.") or "{}"
    return {
        "id": fields.take(call, "id", str, place) or "",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def write_answer(answer: Answer) -> JSON:
    message = write_said(answer.said)
    choice: JSON = {"index": 0, "message": message, "finish_reason": _name_end(answer)}
    choice["logprobs"] = _write_log_probs(answer)
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _count(answer)}


def stream_answer(answer: Answer, call: Call) -> Iterator[str]:
    said = answer.said
    head = _head(answer, "chat.completion.chunk")

    def event(delta: JSON, end: str | None = None, log_probs: JSON | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": end, "logprobs": log_probs}
        return _event({**head, "choices": [choice]})

    yield event({"role": "assistant", "content": ""})
    if said.reasoning is not None:
        yield event({"reasoning_content": said.reasoning})
    yield event({"content": said.content}, log_probs=_write_log_probs(answer))
    message = write_said(said)
    for number, tool_call in enumerate(message.get("tool_calls", ())):
        yield event({"tool_calls": [{"index": number, **tool_call}]})
    yield event({}, _name_end(answer))
    if call.has_usage:
        yield _event({**head, "choices": [], "usage": _count(answer)})
    yield "data: [DONE]\n\n"


def write_error(refused: CallRefused) -> JSON:
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}}


def _head(answer: Answer, kind: str) -> JSON:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": MODEL}


def _name_end(answer: Answer) -> str:
    if answer.is_cut:
        return "length"
    return "tool_calls" if answer.said.tool_calls else "stop"


def _count(answer: Answer) -> JSON:
    prompt, completion = answer.num_prompt_tokens, len(answer.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _write_log_probs(answer: Answer) -> JSON | None:
    if not answer.texts:
        return None
    content = [
        {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, log_prob in zip(answer.texts, answer.log_probs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _event(content: JSON) -> str:
    return f"data: {json.dumps(content)}\n\n"
