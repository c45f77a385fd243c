"""Chats with tools: schemas in the prompt, and what stands between a turn that calls tools and the next turn."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_rl.errors import InputError
from megatron_rl.shared.chat import ChatWriter
from tests import chat_models
from tests.processes import ROOT

TOOLS = [{"type": "function", "function": {"name": name, "description": "Count."}} for name in ("add", "subtract")]
# What the policy writes, by template: each text is a call of `add`.
WRITTEN = {
    "HERMES": '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>',
    "ONE_CALL": '{"name": "add", "parameters": {"a": 2}}',
    "TEXT_ARGUMENTS": '<call>add {"a": 2}</call>',
}


def load(folder: Path, template: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(chat_models.save_tokenizer(folder, template, "<|im_end|>"))


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": f"call-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(name: str, content: str) -> dict[str, str]:
    return {"role": "tool", "name": name, "tool_call_id": f"call-{name}", "content": content}


def render(tokenizer: Any, messages: Sequence[Any]) -> str:
    return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("template", sorted(WRITTEN))
def test_a_chat_that_calls_a_tool_grows_to_what_the_template_gives_the_whole_chat(tmp_path, template: str) -> None:
    tokenizer = load(tmp_path, getattr(chat_models, template))
    writer, question = ChatWriter(tokenizer), {"role": "user", "content": "two?"}
    arguments = '{"a": 2}' if template == "TEXT_ARGUMENTS" else {"a": 2}
    whole = [question, {"role": "assistant", "content": "", "tool_calls": [call("add", arguments)]}]
    whole.append(result("add", "4"))
    before, after = writer.write_prompt([question], TOOLS)
    assert before.endswith("two?")
    written = before + after + WRITTEN[template]
    # The arguments may be text, as in OpenAI's interface.
    assert written + writer.write_turn(whole[2:], TOOLS, [call("add", '{"a": 2}')]) == render(tokenizer, whole)
    # Without the calls, one with the result's name stands for it.
    assert written + writer.write_turn(whole[2:], TOOLS) == render(tokenizer, whole)


@pytest.mark.parametrize(("text", "meant"), [('{"a": 2}', {"a": 2}), ("[2]", "[2]"), ('{"a"', '{"a"')])
def test_arguments_of_an_earlier_call_are_written_as_the_object_that_their_text_spells(tmp_path, text, meant) -> None:
    tokenizer = load(tmp_path, chat_models.HERMES)
    question, answer = {"role": "user", "content": "two?"}, result("add", "4")

    def chat(arguments: Any) -> list[Any]:
        return [question, {"role": "assistant", "content": "", "tool_calls": [call("add", arguments)]}, answer]

    assert "".join(ChatWriter(tokenizer).write_prompt(chat(text), TOOLS)) == render(tokenizer, chat(meant))


def test_several_results_follow_a_turn_in_their_order(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_models.HERMES)
    calls, results = [call("add", {}), call("subtract", {})], [result("add", "4"), result("subtract", "5")]
    said = {"role": "assistant", "content": "Well.", "tool_calls": calls}
    whole = render(tokenizer, [{"role": "user", "content": "?"}, said, *results])
    turn = ChatWriter(tokenizer).write_turn(results, TOOLS, calls)
    assert whole.endswith("</tool_call>" + turn)
    assert turn.index("4") < turn.index("5")


def test_a_template_that_refuses_several_calls_still_writes_their_results(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_models.ONE_CALL)
    results = [result("add", "4"), result("subtract", "5")]
    turn = ChatWriter(tokenizer).write_turn(results, TOOLS, [call("add", {}), call("subtract", {})])
    header = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    assert turn.startswith(f'<|end|>{header}"4"<|eot_id|>{header}"5"<|eot_id|>')


def test_text_of_the_user_follows_a_turn_without_calls_though_there_are_tools(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_models.HERMES)
    chat = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    turn = ChatWriter(tokenizer).write_turn([chat[2]], TOOLS)
    assert render(tokenizer, chat).endswith("assistant" + turn)


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_page_may_say_what_looks_like_a_marker(tmp_path: Path, role: str) -> None:
    tokenizer = load(tmp_path, chat_models.HERMES)
    page = result("add", "first megatronrl0text last") | {"role": role}
    assert "first megatronrl0text last" in ChatWriter(tokenizer).write_turn([page], TOOLS)
    assert ChatWriter(tokenizer).mark != ChatWriter(tokenizer).mark


def test_a_template_without_calls_of_tools_is_refused_and_so_is_one_that_changes_them(tmp_path: Path) -> None:
    writer = ChatWriter(load(tmp_path, chat_models.CHATML))
    with pytest.raises(InputError, match="does not write calls of tools"):
        writer.write_turn([result("add", "4")], TOOLS)
    forgetting = chat_models.HERMES.replace("{% endfor %}<|im_end|>", "{% endfor %}{{ messages | length }}<|im_end|>")
    assert forgetting != chat_models.HERMES
    with pytest.raises(InputError, match="writes a call of a tool otherwise once its result follows"):
        ChatWriter(load(tmp_path / "other", forgetting)).write_turn([result("add", "4")], TOOLS)


TWO_THREADS = """
import sys, threading, time
from megatron_rl.gateway.chats import TemplateChats
from megatron_rl.shared.chat import build_decoder
first, second = (threading.Thread(target=load, args=sys.argv[1:]) for load in (build_decoder, TemplateChats.load))
first.start()
while "transformers" not in sys.modules:
    time.sleep(0.001)
second.start()
first.join(), second.join()
"""


def test_two_threads_may_load_the_tokenizer_at_once(tmp_path: Path) -> None:
    folder = chat_models.save_tokenizer(tmp_path, "HERMES", "<|im_end|>")
    ended = subprocess.run(
        [sys.executable, "-c", TWO_THREADS, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 0
