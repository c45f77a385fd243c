"""OpenAI's responses: requests as calls, and answers as their clients read them."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl.gateway import fields
from megatron_rl.gateway.openai_calls import IGNORED, write_error, write_log_probs
from megatron_rl.gateway.said import MODEL, Advice, Answer, Call, CallRefused, Serving
from megatron_rl.tool_calls import JSON

__all__ = ["read_call", "stream_answer", "write_answer", "write_error"]

_READ = {
    "input", "instructions", "model", "tools", "tool_choice", "max_output_tokens", "stream", "temperature", "text",
    "parallel_tool_calls", "previous_response_id", "store", "reasoning", "include",
}  # fmt: skip
_IGNORED = IGNORED | {
    "stream_options", "top_logprobs", "max_tool_calls", "prompt_cache_options", "context_management", "client_metadata",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {"truncation": ("disabled",), "background": (False,)}
_TEXTS = ("input_text", "output_text", "text")
_LOG_PROBS = "message.output_text.logprobs"


def read_call(body: JSON, serving: Serving) -> Call:
    """Read a request; raise CallRefused with all fields that cannot be served."""
    refusals = fields.Refusals(serving)
    refusals.check_fields(body, _READ, _IGNORED, _NEUTRAL)
    refusals.read(fields.check_model, body)
    refusals.check_temperature(body)
    text = refusals.read(fields.take, body, "text", dict) or {}
    refusals.read(refusals.read_format, text.get("format"), "text.format")
    for part, setting in (("text", "verbosity"), ("reasoning", "effort")):
        if (refusals.read(fields.take, body, part, dict) or {}).get(setting) is not None:
            refusals.advise(Advice(f"{part}.{setting}"), f"{part}.{setting} would change the policy: leave it out")
    refusals.read_parallel(body.get("parallel_tool_calls"))
    instructions = refusals.read(_read_instructions, body) or []
    is_kept = refusals.read(fields.take, body, "store", bool) is not False
    repeated = {name: body.get(name) for name in ("instructions", "previous_response_id", "metadata", "tools")}
    call = Call(
        messages=[*instructions, *(refusals.read(_read_input, body, serving) or [])],
        tools=refusals.read(_read_tools, body, refusals),
        max_tokens=refusals.read(fields.take_bound, body, "max_output_tokens"),
        is_streamed=bool(refusals.read(fields.take, body, "stream", bool)),
        has_log_probs=_LOG_PROBS in (refusals.read(fields.take, body, "include", list) or ()),
        advice=tuple(refusals.advice),
        num_instructions=len(instructions) if is_kept else None,
        settings=repeated,
    )
    refusals.raise_all()
    return call


def _read_instructions(body: JSON) -> list[JSON]:
    instructions = fields.take(body, "instructions", str)
    return [{"role": "system", "content": instructions}] if instructions else []


def _read_input(body: JSON, serving: Serving) -> list[JSON]:
    before: list[JSON] = []
    if (name := fields.take(body, "previous_response_id", str)) is not None:
        known = serving.recall(name.removeprefix("resp_"))
        if known is None:
            raise CallRefused(
                f"previous_response_id {name!r} is not known: it must be an answer of this rollout that was stored, "
                "and of its last ones",
                404,
                parameter="previous_response_id",
            )
        before = known
    items = body.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    if not isinstance(items, list):
        raise CallRefused(f"input must be text or a list of items, and is {items!r:.100}", parameter="input")
    return fields.check_end([*before, *_read_items(fields.list_objects(items, "input"))])


def _read_items(items: Sequence[JSON]) -> list[JSON]:
    """Read items as messages; thoughts, text and calls that follow one another are one answer of the policy."""
    messages: list[JSON] = []
    before = ""
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        read = _read_part(item, kind, f"input[{number}].")
        # A turn thinks, then says something, then calls tools.
        follows = {"message": ("reasoning",), "function_call": ("reasoning", "message", "function_call")}
        if read["role"] == "assistant" and before in follows.get(kind, ()):
            last = messages[-1]
            joined = {**last, **read, "content": last["content"] + read["content"]}
            if "tool_calls" in joined:
                joined["tool_calls"] = [*last.get("tool_calls", ()), *read.get("tool_calls", ())]
            messages[-1] = joined
        else:
            messages.append(read)
        before = kind if read["role"] == "assistant" else ""
    return messages


def _read_part(item: JSON, kind: str, place: str) -> JSON:
    if kind == "message":
        role = fields.need(item, "role", str, place)
        if role not in ("user", "assistant", "system", "developer"):
            raise CallRefused(f"{place}role {role!r} must be user, assistant, system or developer", parameter="input")
        content = fields.read_text(item.get("content"), f"{place}content", "\n", "parts", _TEXTS) or ""
        return {"role": "system" if role == "developer" else role, "content": content}
    if kind == "function_call_output":
        content = fields.read_text(item.get("output"), f"{place}output", "\n", "parts", _TEXTS) or ""
        # Codex tells the policy what it did by itself as the output of no call.
        name = fields.take(item, "call_id", str, place) or fields.need(item, "name", str, place)
        return {"role": "tool", "content": content, "tool_call_id": name}
    if kind == "function_call":
        function = {
            "name": fields.need(item, "name", str, place),
            "arguments": fields.take(item, "arguments", str, place) or "{}",
        }
        call = {"id": fields.need(item, "call_id", str, place), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "reasoning":
        parts = fields.list_objects(fields.take(item, "content", list, place) or [], f"{place}content")
        thoughts = "".join(fields.need(part, "text", str, f"{place}content.") for part in parts)
        return {"role": "assistant", "content": "", **({"reasoning_content": thoughts} if thoughts else {})}
    raise CallRefused(f"{place}type {kind!r} is not known here: the policy reads text and calls", parameter="input")


def _read_tools(body: JSON, refusals: fields.Refusals) -> list[JSON]:
    tools = []
    for number, tool in enumerate(fields.list_objects(fields.take(body, "tools", list) or [], "tools")):
        place = f"tools[{number}]."
        if (kind := tool.get("type")) != "function":
            refusals.advise(Advice("tools"), f"{place}type {kind!r} is not served: the policy calls functions alone")
            continue
        function: JSON = {"name": fields.need(tool, "name", str, place)}
        if description := fields.take(tool, "description", str, place):
            function["description"] = description
        function["parameters"] = fields.take(tool, "parameters", dict, place) or {"type": "object", "properties": {}}
        tools.append({"type": "function", "function": function})
    return refusals.read_choice(body.get("tool_choice"), tools)


def write_answer(answers: Sequence[Answer], call: Call) -> JSON:
    (answer,) = answers
    return _write(answer, call, [*_list_items(answer)])


def stream_answer(answers: Sequence[Answer], call: Call) -> Iterator[str]:
    (answer,) = answers
    events = _list_events(answer, call)
    for number, (kind, content) in enumerate(events):
        data = json.dumps({"type": kind, "sequence_number": number, **content})
        yield f"event: {kind}\ndata: {data}\n\n"


def _list_events(answer: Answer, call: Call) -> Iterator[tuple[str, JSON]]:
    begun = {**_write(answer, call, []), "status": "in_progress", "usage": None, "incomplete_details": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    items = [*_list_items(answer)]
    for number, item in enumerate(items):
        place = {"item_id": item["id"], "output_index": number}
        nothing: JSON = {"arguments": ""} if "arguments" in item else {"content": []}
        empty = {**item, "status": "in_progress", **nothing}
        yield "response.output_item.added", {"output_index": number, "item": empty}
        if "arguments" in item:
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **done}
        for at, part in enumerate(item.get("content", ())):
            within, kind = {**place, "content_index": at}, part["type"]
            log_probs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            yield "response.content_part.added", {**within, "part": {**part, "text": ""}}
            yield f"response.{kind}.delta", {**within, "delta": part["text"], **log_probs}
            yield f"response.{kind}.done", {**within, "text": part["text"], **log_probs}
            yield "response.content_part.done", {**within, "part": part}
        yield "response.output_item.done", {"output_index": number, "item": item}
    yield "response.incomplete" if answer.is_cut else "response.completed", {"response": _write(answer, call, items)}


def _list_items(answer: Answer) -> Iterator[JSON]:
    said, status = answer.said, "incomplete" if answer.is_cut else "completed"
    if said.reasoning is not None:
        thoughts = [{"type": "reasoning_text", "text": said.reasoning}]
        yield {"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": thoughts, "status": status}
    if said.content or not said.tool_calls:
        log_probs = write_log_probs(answer)
        text = {
            "type": "output_text", "text": said.content, "annotations": [],
            "logprobs": [] if log_probs is None else log_probs["content"],
        }  # fmt: skip
        head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant"}
        yield {**head, "content": [text], "status": status}
    for number, call in enumerate(said.tool_calls):
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        yield {"id": f"fc_{answer.id}_{number}", "type": "function_call", **named, "status": status}


def _write(answer: Answer, call: Call, items: list[JSON]) -> JSON:
    prompt, completion = answer.num_prompt_tokens, len(answer.tokens)
    usage = {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": completion, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }  # fmt: skip
    settings = {name: value for name, value in call.settings.items() if value is not None}
    return {
        "id": f"resp_{answer.id}", "object": "response", "created_at": int(time.time()), "model": MODEL, "error": None,
        "status": "incomplete" if answer.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "output": items, "usage": usage, "instructions": None, "metadata": {}, "tools": [], "tool_choice": "auto",
        "parallel_tool_calls": True, "previous_response_id": None, "temperature": None, "top_p": 1.0,
        "text": {"format": {"type": "text"}}, "truncation": "disabled", **settings,
    }  # fmt: skip
