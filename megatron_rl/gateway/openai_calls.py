"""OpenAI's chat completions: requests as calls, and answers as their clients read them."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl.gateway import fields
from megatron_rl.gateway.said import MODEL, Answer, Call, CallRefused, Serving, write_said
from megatron_rl.tool_calls import JSON

_READ = {
    "messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stream_options",
    "logprobs", "top_logprobs", "temperature", "stop", "n", "response_format", "parallel_tool_calls",
}  # fmt: skip
# None of these changes what is sampled; seeds are the run's.
IGNORED = {
    "user", "metadata", "store", "seed", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],), "functions": (), "function_call": (),
}  # fmt: skip
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


# The most answers to a call.
_MOST_ANSWERS = 64


def read_call(body: JSON, serving: Serving) -> Call:
    """Read a request; raise CallRefused with all fields that cannot be served."""
    refusals = fields.Refusals(serving)
    refusals.check_fields(body, _READ, IGNORED, NEUTRAL)
    refusals.read(fields.check_model, body)
    refusals.check_temperature(body)
    refusals.read(refusals.read_format, body.get("response_format"), "response_format")
    refusals.read_parallel(body.get("parallel_tool_calls"))
    options = refusals.read(fields.take, body, "stream_options", dict) or {}
    call = Call(
        messages=refusals.read(_read_messages, body),
        tools=refusals.read(_read_tools, body, refusals),
        max_tokens=refusals.read(fields.take_bound, body, "max_tokens", "max_completion_tokens"),
        is_streamed=bool(refusals.read(fields.take, body, "stream", bool)),
        has_usage=options.get("include_usage") is True,
        has_log_probs=bool(refusals.read(fields.take, body, "logprobs", bool)),
        stop=refusals.read(fields.take_stop, body, "stop") or (),
        num_answers=refusals.read(take_number, body) or 1,
        advice=tuple(refusals.advice),
    )
    refusals.raise_all()
    return call


def take_number(body: JSON) -> int | None:
    """Return the number of answers that are asked for."""
    number = fields.take(body, "n", int)
    if number is not None and not 1 <= number <= _MOST_ANSWERS:
        raise CallRefused(f"n {number} must be between 1 and {_MOST_ANSWERS}", parameter="n")
    return number


def _read_messages(body: JSON) -> list[JSON]:
    messages = fields.list_objects(fields.need(body, "messages", list), "messages")
    return fields.check_end([_read_message(one, f"messages[{number}].") for number, one in enumerate(messages)])


def _read_tools(body: JSON, refusals: fields.Refusals) -> list[JSON]:
    tools = fields.list_objects(fields.take(body, "tools", list) or [], "tools")
    for number, tool in enumerate(tools):
        place = f"tools[{number}]."
        if tool.get("type") != "function":
            raise CallRefused(f"{place}type must be 'function', and is {tool.get('type')!r}", parameter="tools")
        fields.need(fields.need(tool, "function", dict, place), "name", str, f"{place}function.")
    return refusals.read_choice(body.get("tool_choice"), tools)


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


def write_answer(answers: Sequence[Answer], call: Call) -> JSON:
    choices = [
        {
            "index": number,
            "message": write_said(answer.said),
            "finish_reason": _name_end(answer),
            "logprobs": write_log_probs(answer),
        }
        for number, answer in enumerate(answers)
    ]
    return {**_head(answers[0], "chat.completion"), "choices": choices, "usage": write_usage(answers)}


def stream_answer(answers: Sequence[Answer], call: Call) -> Iterator[str]:
    head = _head(answers[0], "chat.completion.chunk")
    for number, answer in enumerate(answers):
        for delta, end, log_probs in _list_deltas(answer):
            choice = {"index": number, "delta": delta, "finish_reason": end, "logprobs": log_probs}
            yield write_event({**head, "choices": [choice]})
    if call.has_usage:
        yield write_event({**head, "choices": [], "usage": write_usage(answers)})
    yield "data: [DONE]\n\n"


def _list_deltas(answer: Answer) -> Iterator[tuple[JSON, str | None, JSON | None]]:
    """List the parts of an answer, each with the reason of its end and the log-probs of its tokens."""
    said = answer.said
    yield {"role": "assistant", "content": ""}, None, None
    if said.reasoning is not None:
        yield {"reasoning_content": said.reasoning}, None, None
    yield {"content": said.content}, None, write_log_probs(answer)
    for number, tool_call in enumerate(write_said(said).get("tool_calls", ())):
        yield {"tool_calls": [{"index": number, **tool_call}]}, None, None
    yield {}, _name_end(answer), None


def write_error(refused: CallRefused) -> JSON:
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    return {"error": {"message": str(refused), "type": kind, "param": refused.parameter, "code": refused.code}}


def _head(answer: Answer, kind: str) -> JSON:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": int(time.time()), "model": MODEL}


def _name_end(answer: Answer) -> str:
    if answer.is_cut:
        return "length"
    return "tool_calls" if answer.said.tool_calls else "stop"


def write_usage(answers: Sequence[Answer]) -> JSON:
    prompt, completion = answers[0].num_prompt_tokens, sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def write_log_probs(answer: Answer) -> JSON | None:
    """Write the log-probs of an answer's tokens; of a token's alternatives, the sampled one alone is known."""
    if not answer.texts:
        return None
    content = []
    for text, log_prob in zip(answer.texts, answer.log_probs, strict=True):
        sampled = {"token": text, "logprob": log_prob, "bytes": list(text.encode(errors="surrogatepass"))}
        content.append({**sampled, "top_logprobs": [sampled]})
    return {"content": content, "refusal": None}


def write_event(content: JSON) -> str:
    return f"data: {json.dumps(content)}\n\n"
