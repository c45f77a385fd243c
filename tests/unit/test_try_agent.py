"""`megatron-rl try-agent`: an agent acts once, through the gateway of a run, without an engine."""

from pathlib import Path

import pytest

from megatron_rl.cli import main
from megatron_rl.errors import ExitCode
from tests import chat_models

AGENT = """
import json
import openai

CLIENT = openai.OpenAI()
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "array", "items": {"$ref": "#/$defs/Day"}}},
    "$defs": {"Day": {"type": "object", "properties": {"number": {"type": "integer", "minimum": 3}}}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("sun", "rain")]


def act(base_url, api_key, model, prompt, city="nowhere", **row):
    messages, names = [{"role": "user", "content": f"Which weather is in {city}?"}], []
    while True:
        message = CLIENT.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return {"calls": len(names), "said": bool(message.content), "chat": isinstance(prompt, list)}
        for call in message.tool_calls:
            assert json.loads(call.function.arguments) == {"city": "Oslo", "days": [{"number": 3}]}
            names.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{call.function.name}: much"})


def act_otherwise(base_url, api_key, model):
    messages = [{"role": "user", "content": "Hello"}]
    CLIENT.chat.completions.create(model=model, messages=messages, top_p=0.5, presence_penalty=2)


def look(base_url, api_key, model):
    print("I only look")
    CLIENT.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}])


def fail(base_url, api_key, model):
    CLIENT.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}])
    try:
        json.loads("{")
    except ValueError as error:
        raise LookupError("no weather\\nfor any city") from error
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path / "agent.py"


def test_an_agent_calls_its_tools_once_each_and_its_chat_and_reward_are_printed(file: Path, capfd) -> None:
    (file.parent / "rows.jsonl").write_text(
        '{"prompt": "Which weather?", "city": "Rome"}\n{"prompt": "And there?", "city": "Bern"}'
    )
    chat_models.save_tokenizer(file.parent / "model", chat_models.HERMES, "<|im_end|>")
    flags = ["--prompts", f"{file.parent / 'rows.jsonl'}", "--prompt-chat", "--hf-model", f"{file.parent / 'model'}"]
    for arguments, city, reward in (([], "nowhere", 3), (flags, "Rome", 4)):
        assert main(["try-agent", f"{file}:act", *arguments]) == ExitCode.OK
        out = capfd.readouterr().out
        assert f"user: Which weather is in {city}?" in out
        assert [out.count(f"policy: calls {name} with") for name in ("sun", "rain")] == [1, 1]
        assert out.index("tool: sun: much") < out.index("tool: rain: much") < out.index("policy: This is the answer")
        assert f"reward {reward} (calls 2, said 1, chat {reward - 3})" in out


def test_an_agent_without_a_reward_of_its_own_is_none_that_failed_and_its_output_is_shown(file: Path, capfd) -> None:
    assert main(["try-agent", f"{file}:look"]) == ExitCode.OK
    printed = capfd.readouterr()
    assert "which a run writes to rewards.log\n  I only look\n" in printed.out
    assert "no reward of its own: a run needs --reward, finish reason stop" in printed.out


def test_refused_parameters_are_printed_once_with_their_reasons_and_no_reward_is_exit_code_5(file: Path, capfd) -> None:
    assert main(["try-agent", f"{file}:act_otherwise"]) == ExitCode.RUN
    printed = capfd.readouterr()
    assert printed.out.count("a call was refused: 2 parts are refused: ") == 1
    assert "top_p 0.5 would sample" in printed.out
    assert "presence_penalty 2 would sample" in printed.out
    assert "BadRequestError: Error code: 400" in printed.err
    # The reason is shown although the client raises without it.
    assert "; one of its calls was refused: 2 parts are refused: " in printed.err


def test_an_agent_that_raises_is_reported_with_class_first_line_and_cause(file: Path, capfd) -> None:
    assert main(["try-agent", f"{file}:fail"]) == ExitCode.RUN
    printed = capfd.readouterr()
    assert "policy: This is the answer" in printed.out
    assert "LookupError: no weather; caused by JSONDecodeError: " in printed.err
    assert "Traceback (most recent call last)" in printed.out
