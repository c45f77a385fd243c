"""Turns that vLLM's parsers read for us, beside the answers of vLLM's own server; one process reads them all."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.vllm.reader import Parsers, VllmReader
from megatron_rl.tool_calls import Said
from tests import chat_models

ROOT = Path(__file__).parents[2]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
# DeepSeek's tokens have a bar of another alphabet.
BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, ALL_END = (
    f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
DEEPSEEK = (
    f"{BEGIN}{CALL_BEGIN}function{SEPARATOR}get_weather\n```json\n"
    f'{{"city": "Zürich", "days": 2}}\n```{CALL_END}{ALL_END}'
)
LLAMA = '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}'
CALL = ("get_weather", {"city": "Zürich", "days": 2})
# Parsers, a turn, and the number of calls in it.
TURNS: list[tuple[str | None, str | None, str, int]] = [
    ("hermes", None, HERMES, 1),
    ("hermes", None, f"Let me see.\n{HERMES}\n{HERMES}", 2),
    ("hermes", None, "It is sunny.", 0),
    ("hermes", None, '<tool_call>{"name": "get_weather", "arguments": {"city": </tool_call>', 0),
    ("hermes", "deepseek_r1", f"A thought.</think>\n\n{HERMES}", 1),
    ("qwen3_coder", None, f"Let me see.\n{CODER}", 1),
    ("qwen3_coder", None, "It is sunny.", 0),
    ("deepseek_v3", None, f"Let me see.{DEEPSEEK}", 1),
    ("deepseek_v3", "deepseek_r1", f"<think>A thought.</think>{DEEPSEEK}", 1),
    ("llama3_json", None, LLAMA, 1),
    (None, "deepseek_r1", "A thought.</think>It is sunny.", 0),
]
ORDINARY = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tokenizer of bytes that has the tokens of several models' calls."""
    folder = chat_models.save_tokenizer(tmp_path_factory.mktemp("calls"), chat_models.HERMES, "<|im_end|>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = (*ORDINARY, BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, ALL_END)
    tokenizer.add_tokens([transformers.AddedToken(one, special=False, normalized=False) for one in tokens])
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    return folder


@pytest.mark.each_change
def test_turns_are_read_as_vllm_serves_them(folder: Path) -> None:
    asked = [(tool, reasoning, text, TOOLS) for tool, reasoning, text, _ in TURNS]
    # Without tools, a call is text.
    asked.append(("hermes", None, HERMES, []))
    words = [sys.executable, "-m", "tests.sidecar.served_turns", str(folder)]
    done = subprocess.run(words, input=json.dumps(asked), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: list[tuple[Any, Any]] = json.loads(done.stdout.splitlines()[-1])
    for (served, read), (tool, reasoning, text, num_calls) in zip(
        found, [*TURNS, ("hermes", None, HERMES, 0)], strict=True
    ):
        name = f"{tool} {reasoning} {text!r}: served {served}, read {read}"
        assert read["content"] == (served.get("content") or ""), name
        assert read["reasoning"] == served.get("reasoning"), name
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in served.get("tool_calls") or ()]
        assert [tuple(call[1:]) for call in read["calls"]] == calls, name
        assert [(called, json.loads(arguments)) for called, arguments in calls] == [CALL] * num_calls, name
        # Ids follow from the turn, and differ within it.
        assert len({call[0] for call in read["calls"]}) == num_calls, name
    assert found[4][1]["reasoning"] == "A thought."
    assert found[0][1]["calls"][0][0] == found[0][1]["calls"][0][0] != found[1][1]["calls"][0][0]


@pytest.mark.each_change
def test_a_process_of_parsers_reads_turns_and_refuses_a_name_that_vllm_does_not_have(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    async def run() -> tuple[Said, Said]:
        reader = VllmReader(sys.executable, Parsers("hermes", None, folder), folder / "log")
        await reader.start()
        turn = [*tokenizer.encode(HERMES), chat_models.find("<|im_end|>")]
        try:
            return await reader.read(turn, HERMES, TOOLS), await reader.read(turn, HERMES, TOOLS)
        finally:
            await reader.close()

    first, second = asyncio.run(run())
    assert [(call.name, json.loads(call.arguments)) for call in first.tool_calls] == [CALL]
    # vLLM draws ids; ours are the same for the same turn.
    assert first == second

    async def refuse() -> None:
        reader = VllmReader(sys.executable, Parsers("hermess", None, folder), folder / "log")
        try:
            await reader.start()
        finally:
            await reader.close()

    with pytest.raises(
        UsageError, match="--rollout-tool-parser hermess must be a parser of vLLM: write one of .*hermes"
    ):
        asyncio.run(refuse())
