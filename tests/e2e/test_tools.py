"""Whole runs in which the policy calls tools, over scripted engines."""

from pathlib import Path

import pytest

from examples.calculator import demo as calculator
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.e2e import test_resume as resume
from tests.e2e.test_environments import CHANGES, read_responses
from tests.e2e.test_loop import compare_schedules, script

SUMS = '''
class Sums:
    """A sum of numbers: a tool adds to it, another one reads it, and a turn without a call ends the conversation."""

    def reset(self, answer, seed, **row):
        self._sum, self._num_calls = seed % 5, 0
        return "2 3" if int(answer) % 2 else None

    def add(self, first: int, second: int) -> int:
        """Add two numbers.

        Args:
            first: A number.
            second: Another one.
        """
        self._num_calls += 1
        self._sum += first + second
        if self._sum % 7 == 0:
            raise ValueError("seven is unlucky")
        return 2 + self._sum % 100

    async def read(self, digit: int) -> str:
        """Read the sum.

        Args:
            digit: The digit to read.
        """
        self._num_calls += 1
        return f"{2 + self._sum % 100} {2 + digit % 10}"

    def get_reward(self):
        return float(self._sum % 4) - 0.1 * self._num_calls
'''
# An agent that offers a tool, and sends back what it is told with a result.
AGENT = """
import json
import openai

CLIENT = openai.OpenAI(base_url="http://localhost", api_key="each rollout has its own")
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculate", "description": "Compute.", "parameters": PARAMETERS}}]


def act(base_url, api_key, model, prompt, **row):
    chats = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions
    said = chats.create(model=model, messages=prompt, tools=TOOLS).choices[0].message
    calls = said.tool_calls or []
    if calls:
        results = [{"role": "tool", "tool_call_id": call.id, "content": "098895"} for call in calls]
        chats.create(model=model, messages=[*prompt, said, *results], tools=TOOLS)
    return {"calls": float(sum([*json.loads(call.function.arguments)] == ["expression"] for call in calls))}
"""
# A chat begins with a token for each tool.
TEMPLATE = "{% for tool in tools or [] %}5 {% endfor %}{% for m in messages %}{{ m.content }} {% endfor %}"
TOOLS = {**CHANGES, "prompt_chat": True, "rollout_max_tokens": 38}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    world = loop.make_world(tmp_path_factory.mktemp("tools"))
    (world.model / "chat_template.jinja").write_text(TEMPLATE)
    return world


def write_sums(world: loop.World) -> str:
    path = world.folder / "sums.py"
    path.write_text(SUMS)
    return f"{path}:Sums"


@pytest.mark.each_change
def test_periodic_and_sync_end_in_the_same_weights_where_the_policy_calls_tools(world) -> None:
    compare_schedules(world, "tools", 1, [51], rollout_env=write_sums(world), **TOOLS)
    run = world.folder / "tools-51" / "run"
    assert not verify(run).breaches
    turns = [sum(span[0] != "environment" for span in one["spans"]) for one in read_responses(run)]
    assert set(turns) == {1, 2, 3}


@pytest.mark.slow
def test_a_run_killed_amid_calls_of_tools_resumes_as_if_it_had_not_been(world) -> None:
    changes = {**TOOLS, "rollout_env": write_sums(world), "rollout_script": script(world, 61)}
    whole = resume.uninterrupted(world, "whole", 1, **changes)
    folder = resume.killed(world, "killed", 1, {0: resume.fault("generation", "sidecar")}, **changes)
    resume.resumed(world, folder, 1, **changes)
    resume.assert_same(folder, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_calls_that_vllms_parsers_read_reach_an_agent_whose_history_is_not_tokenized_again(tmp_path: Path) -> None:
    calculator.warm_up(tmp_path / "model", 0, num_steps=150)
    calculator.write_rows(tmp_path, 0)
    (tmp_path / "agent.py").write_text(AGENT)
    words = loop.World(tmp_path, tmp_path / "model", tmp_path / "train.jsonl", "").words(
        "run", reward=None, reward_workers=None, prompt_chat=True, rollout_agent=f"{tmp_path / 'agent.py'}:act",
        rollout_agent_timeout=300, rollout_tool_parser="hermes", rollout_engine="vllm", rollout_num_engines=1,
        rollout_max_num_seqs=16, rollout_max_tokens=52, train_iters=2,
    )  # fmt: skip
    loop.run(tmp_path / "ranks", 1, words, OMP_NUM_THREADS="1")
    run = tmp_path / "runs" / "run"
    assert not verify(run).breaches
    responses = read_responses(run)
    turns = [sum(span[0] != "environment" for span in response["spans"]) for response in responses]
    # Half of the chats that the model has learned from have a call.
    assert turns.count(2) >= 10, turns
    for response, num_turns in zip(responses, turns, strict=True):
        assert (response["reward"] >= 1) == (num_turns == 2)
        # The tools stand before the prompt: the first turn leaves it, and the second one follows the first.
        assert len(response.get("branches", ())) <= 1
