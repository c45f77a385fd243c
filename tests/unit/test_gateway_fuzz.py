"""Requests of any content to each interface of the gateway: they are served or refused, and nothing else."""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.gateway import anthropic_calls, completion_calls, openai_calls, responses_calls
from megatron_rl.gateway.said import MODEL, Answer, CallRefused, Serving
from megatron_rl.tool_calls import Said, ToolCall

INTERFACES = [openai_calls, responses_calls, completion_calls, anthropic_calls]
NAMES = [
    "role", "content", "type", "text", "name", "id", "call_id", "arguments", "function", "tool_calls", "tool_call_id",
    "parameters", "input_schema", "input", "output", "schema", "json_schema", "format", "effort", "description",
    "tool_use_id", "thinking", "include_usage",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.sampled_from(NAMES) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=8,
)
FUNCTION: dict[str, Any] = {"name": "add", "parameters": {"type": "object"}, "description": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
USER = {"role": "user", "content": "x"}
ITEMS: dict[ModuleType, list[Any]] = {
    openai_calls: [
        USER, {"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "reasoning_content": "x"}, {"role": "developer", "content": "x"},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ],
    responses_calls: [
        USER, {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ],
    completion_calls: [USER],
    anthropic_calls: [
        USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]},
    ],
}  # fmt: skip
SERVED: dict[str, list[Any]] = {
    "tools": [[{"type": "function", "function": FUNCTION}], [{"type": "function", **FUNCTION}], [{"type": "x"}],
              [{"name": "add", "input_schema": {"type": "object"}}]],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "add"}}, {"type": "any"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}],
    "text": [{"format": {"type": "json_schema", "schema": {"$ref": "#"}}, "verbosity": "low"}],
    "output_config": [{"effort": "high", "format": {"type": "json_schema", "schema": {}}}],
    "thinking": [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 5}], "parallel_tool_calls": [False],
    "stop": ["x", ["x"]], "stop_sequences": [["x"]], "n": [1, 2], "temperature": [0, 1], "stream": [True],
    "stream_options": [{"include_usage": True}], "logprobs": [True, 1], "prompt": ["x", [1, 2]], "system": ["x"],
    "instructions": ["x"], "previous_response_id": ["resp_x"], "store": [False], "include": [[]],
    "reasoning": [{"effort": "low"}], "max_tokens": [5], "max_output_tokens": [5], "max_completion_tokens": [5],
    "top_logprobs": [3],
}  # fmt: skip


@st.composite
def draw_bodies(draw: Any, interface: Any) -> dict[str, Any]:
    """Draw a request that is served, and put any value in some of its places."""

    def spoil(value: Any) -> Any:
        if draw(st.integers(0, 40)) == 0:
            return draw(VALUES)
        if isinstance(value, dict):
            return {name: spoil(part) for name, part in value.items()}
        return [spoil(part) for part in value] if isinstance(value, list) else value

    items = [*draw(st.lists(st.sampled_from(ITEMS[interface]), max_size=4)), USER]
    body = {"messages": items, "input": items, "prompt": "x"}
    for name in draw(st.lists(st.sampled_from(list_fields(interface)), max_size=5)):
        body[name] = draw(st.sampled_from(SERVED[name])) if name in SERVED else draw(VALUES)
    body = {name: value for name, value in body.items() if name in interface._READ}
    spoilt: dict[str, Any] = spoil(body)
    return {**(spoilt if isinstance(spoilt, dict) else {}), "model": MODEL}


def list_fields(interface: ModuleType) -> list[str]:
    others = ["top_p", "logit_bias", "reasoning_effort", "unheard_of"]
    return sorted({*interface._READ, *others} - {"messages", "input", "model"})


@pytest.mark.parametrize("advises", [False, True])
@pytest.mark.parametrize("interface", INTERFACES, ids=[one.__name__.rpartition(".")[2] for one in INTERFACES])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_request_of_any_content_is_served_or_refused(interface: Any, advises: bool, data: st.DataObject) -> None:
    body = data.draw(draw_bodies(interface))
    try:
        call = interface.read_call(body, Serving(1.0, advises, {"x": [{"role": "user", "content": "x"}]}.get))
    except CallRefused as refused:
        interface.write_error(refused)
        return
    assert call.prompt is not None or call.digests
    assert all(message["role"] and isinstance(message["content"], str) for message in call.write_messages())
    said = Said("\ud83d", "hm", (ToolCall("1", "add", "{"),))
    answer = Answer("a", said, False, 3, [1, 2], [-1.0, -2.0], ["\ud83d", "b"], None)
    answers = [answer] * call.num_answers
    assert interface.write_answer(answers, call)
    assert all([*interface.stream_answer(answers, call)])
    assert all(isinstance(advice.is_followed(said), bool) for advice in call.advice)
