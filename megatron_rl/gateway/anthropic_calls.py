"""Anthropic's messages: requests as calls, and answers as their clients read them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_rl.gateway import fields
from megatron_rl.gateway.said import MODEL, Advice, Answer, Call, CallRefused, Serving
from megatron_rl.tool_calls import JSON

_READ = {
    "messages", "model", "tools", "tool_choice", "max_tokens", "stream", "system", "temperature", "thinking",
    "stop_sequences", "output_config",
}  # fmt: skip
# None of these changes what is sampled.
IGNORED = {"metadata", "service_tier", "cache_control", "context_management"}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
}  # fmt: skip


def read_call(body: JSON, serving: Serving) -> Call:
    """Read a request; raise CallRefused with all fields that cannot be served."""
    refusals = fields.Refusals(serving)
    refusals.check_fields(body, _READ, IGNORED, NEUTRAL)
    refusals.read(fields.check_model, body)
    refusals.check_temperature(body)
    refusals.read(_check_thinking, body, refusals)
    output = refusals.read(fields.take, body, "output_config", dict) or {}
    refusals.read(refusals.read_format, output.get("format"), "output_config.format")
    if output.get("effort") is not None:
        refusals.advise(Advice("output_config.effort"), "output_config.effort would change the policy: leave it out")
    call = Call(
        messages=refusals.read(_read_messages, body),
        tools=refusals.read(_read_tools, body, refusals),
        max_tokens=refusals.read(fields.take_bound, body, "max_tokens"),
        is_streamed=bool(refusals.read(fields.take, body, "stream", bool)),
        stop=refusals.read(fields.take_stop, body, "stop_sequences") or (),
        advice=tuple(refusals.advice),
    )
    refusals.raise_all()
    return call


def _check_thinking(body: JSON, refusals: fields.Refusals) -> None:
    thinking = fields.take(body, "thinking", dict) or {"type": "adaptive"}
    # A budget only bounds thoughts, and whether there are any is the policy's choice.
    if thinking.get("type") not in ("enabled", "adaptive"):
        reason = f"thinking {thinking!r} would force what the policy says: leave it out"
        refusals.advise(Advice("thinking", is_followed=lambda said: said.reasoning is None), reason)


def _read_messages(body: JSON) -> list[JSON]:
    messages: list[JSON] = []
    if (system := fields.read_text(body.get("system"), "system", "", "blocks")) is not None:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(fields.list_objects(fields.need(body, "messages", list), "messages")):
        messages += _read_message(message, f"messages[{number}].")
    return fields.check_end(messages)


def _read_tools(body: JSON, refusals: fields.Refusals) -> list[JSON]:
    tools = []
    for number, tool in enumerate(fields.list_objects(fields.take(body, "tools", list) or [], "tools")):
        place = f"tools[{number}]."
        if tool.get("type") not in (None, "custom"):
            raise CallRefused(
                f"{place}type {tool['type']!r} is run by Anthropic's own servers alone", parameter="tools"
            )
        function = {"name": fields.need(tool, "name", str, place)}
        if description := fields.take(tool, "description", str, place):
            function["description"] = description
        function["parameters"] = fields.need(tool, "input_schema", dict, place)
        tools.append({"type": "function", "function": function})
    choice = fields.take(body, "tool_choice", dict) or {"type": "auto"}
    refusals.read_parallel(choice.get("disable_parallel_tool_use") is not True)
    return refusals.read_choice(choice, tools)


def _read_message(message: JSON, place: str) -> Iterator[JSON]:
    """Yield a message as messages of OpenAI's form: each result of a tool is one of its own."""
    role = fields.need(message, "role", str, place)
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise CallRefused(f"{place}role {role!r} must be user, assistant or system", parameter="messages")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise CallRefused(f"{place}content must be text or a list of blocks", parameter="messages")
    fields.list_objects(blocks, f"{place}content")
    if role == "assistant":
        yield _read_assistant(blocks, place)
        return
    texts: list[JSON] = []
    for number, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        within = f"{place}content[{number}]."
        result = fields.read_text(block.get("content"), f"{within}content", "\n", "blocks") or ""
        yield {"role": "tool", "content": result, "tool_call_id": fields.need(block, "tool_use_id", str, within)}
    if texts or not blocks:
        yield {"role": role, "content": fields.read_text(texts, f"{place}content", "\n", "blocks") or ""}


def _read_assistant(blocks: list[JSON], place: str) -> JSON:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        within = f"{place}content[{number}]."
        if block.get("type") == "text":
            texts.append(fields.need(block, "text", str, within))
        elif block.get("type") == "thinking":
            thoughts.append(fields.need(block, "thinking", str, within))
        elif block.get("type") == "tool_use":
            function = {
                "name": fields.need(block, "name", str, within),
                "arguments": json.dumps(fields.need(block, "input", dict, within)),
            }
            calls.append({"id": fields.need(block, "id", str, within), "type": "function", "function": function})
        else:
            raise CallRefused(f"{within}type {block.get('type')!r} is not known here", parameter="messages")
    message: JSON = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def write_answer(answers: Sequence[Answer], call: Call) -> JSON:
    (answer,) = answers
    return {
        **_head(answer),
        "content": [*_list_blocks(answer)],
        "stop_reason": _name_end(answer),
        "stop_sequence": answer.stopped_by,
        "usage": _count(answer, len(answer.tokens)),
    }


def stream_answer(answers: Sequence[Answer], call: Call) -> Iterator[str]:
    (answer,) = answers
    yield _event("message_start", {"message": {**_head(answer), "content": [], "usage": _count(answer, 0)}})
    for number, block in enumerate(_list_blocks(answer)):
        begun, deltas = _split(block)
        yield _event("content_block_start", {"index": number, "content_block": begun})
        for delta in deltas:
            yield _event("content_block_delta", {"index": number, "delta": delta})
        yield _event("content_block_stop", {"index": number})
    end = {"stop_reason": _name_end(answer), "stop_sequence": answer.stopped_by}
    yield _event("message_delta", {"delta": end, "usage": {"output_tokens": len(answer.tokens)}})
    yield _event("message_stop", {})


def write_error(refused: CallRefused) -> JSON:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    kind = kinds.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


def _head(answer: Answer) -> JSON:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "stop_reason": None,
        "stop_sequence": None,
    }


def _list_blocks(answer: Answer) -> Iterator[JSON]:
    said = answer.said
    if said.reasoning is not None:
        yield {"type": "thinking", "thinking": said.reasoning, "signature": answer.id}
    if said.content or not said.tool_calls:
        yield {"type": "text", "text": said.content}
    for call in said.tool_calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": _read_object(call.arguments)}


def _read_object(arguments: str) -> JSON:
    try:
        value = json.loads(arguments or "{}")
        # Python reads numbers that JSON does not have.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = None
    # Clients of this interface read objects alone.
    return value if isinstance(value, dict) else {"arguments": arguments}


def _split(block: JSON) -> tuple[JSON, Sequence[JSON]]:
    """Split a block into its start and what is added to it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {"type": "thinking", "thinking": "", "signature": ""}, deltas
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _name_end(answer: Answer) -> str:
    if answer.is_cut:
        return "max_tokens"
    if answer.stopped_by is not None:
        return "stop_sequence"
    return "tool_use" if answer.said.tool_calls else "end_turn"


def _count(answer: Answer, num_output: int) -> JSON:
    return {"input_tokens": answer.num_prompt_tokens, "output_tokens": num_output}


def _event(kind: str, content: JSON) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n"
