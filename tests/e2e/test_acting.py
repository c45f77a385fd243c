"""Whole runs in which the policy acts, in environments, with tools and through agents, over scripted engines."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.calculator import demo as calculator
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.trace import read_trace
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.sidecar.temporary import make_socket_folder
from tests.e2e import loop
from tests.e2e import test_resume as resume
from tests.e2e.test_loop import compare_schedules, script

GAME = '''
class Game:
    """A game over numbers: it adds what it hears to a sum, and ends when the sum is a multiple of three."""

    def reset(self, answer, seed, **row):
        self.sum, self.turns, self.answer = seed % 5, 0, int(answer)
        return "2 3" if self.answer % 2 else None

    async def step(self, completion):
        numbers = [int(word) for word in completion.split()]
        self.turns += 1
        self.sum += sum(numbers)
        if FAULTS and self.answer == 3 and self.turns == 2:
            raise RuntimeError("the third game is broken")
        if FAULTS and self.answer == 4 and sum(numbers) % 4 == 0:
            import os
            os._exit(9)
        return None if self.sum % 3 == 0 else " ".join(str(2 + (self.sum + place) % 100) for place in range(4))

    def get_reward(self):
        return float(self.sum % 4) - 0.1 * self.turns
'''

AGENT = '''
import os, openai
from concurrent.futures import ThreadPoolExecutor

CLIENT = openai.OpenAI(base_url="http://localhost", api_key="unused", max_retries=0)

def say(role, content):
    return {"role": role, "content": content}

def act(base_url, api_key, model, prompt, answer, seed, **row):
    """Ask, and ask again after the answer: twice at once if the row's answer is odd."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)

    def ask(messages, most=8):
        answered = client.chat.completions.create(model=model, messages=messages, max_tokens=most)
        return answered.choices[0].message.content

    first = ask([say("user", prompt)], most=10)
    if FAULTS and int(answer) == 3:
        raise RuntimeError("the third agent is broken")
    if AWAY and hash((seed, answer)) % 5 == 0:
        raise OSError("its tool's host is away")
    # One of the four responses of a group, whose seeds follow one another.
    if FAULTS and int(answer) % 2 == 0 and seed % 4 == 0:
        os._exit(9)
    chat = [say("user", prompt), say("assistant", first)]
    texts = ["2 3", "4"] if int(answer) % 2 else ["5 6"]
    with ThreadPoolExecutor(2) as executor:
        said = [*executor.map(ask, [[*chat, say("user", text)] for text in texts])]
    if int(answer) % 4 == 0:
        said.append(ask([*chat, say("user", texts[0]), say("assistant", said[0]), say("user", "9")], most=99))
    total = seed % 5 + sum(int(word) for text in [first, *said] for word in text.split())
    return {"sum": float(total % 4), "turns": -0.1 * len(said)}
'''

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

CREDITED_GAME = """
class Game:
    def reset(self, answer, seed, **row):
        self.sum, self.left = seed % 5, 2 + int(answer) % 2

    def step(self, completion):
        self.sum += sum(map(int, completion.split()))
        self.left -= 1
        reward = float(self.sum % 4)
        return (f"{2 + self.sum % 90}" if self.left else None), reward

    def get_reward(self):
        return 0.25
"""

# An agent that offers a tool, and sends back what it is told with a result.
AGENT_WITH_TOOL = """
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

CHANGES: dict[str, Any] = {
    "reward": None, "reward_workers": None, "rollout_env_max_turns": 3, "rollout_max_tokens": 40, "log_samples": 32,
    "rollout_env_workers": 1,
}  # fmt: skip
AGENTS = {**CHANGES, "rollout_agent_timeout": 300}
TOOLS = {**CHANGES, "prompt_chat": True, "rollout_max_tokens": 38}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("acting"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> loop.World:
    world = loop.make_world(tmp_path_factory.mktemp("chats"))
    (world.model / "chat_template.jinja").write_text(TEMPLATE)
    return world


def write(world: loop.World, name: str, code: str, function: str) -> str:
    path = world.folder / f"{name}.py"
    path.write_text(code)
    return f"{path}:{function}"


def make_changes(kind: str, world: loop.World, has_faults: bool = False, is_away: bool = False) -> dict[str, Any]:
    """Return the flags of a run in which the policy acts in this way; an actor may have planted faults.

    One that `is_away` fails for every fifth seed.
    """
    faults = f"FAULTS, AWAY = {has_faults}, {is_away}\n"
    if kind == "tools":
        return {**TOOLS, "rollout_env": write(world, "sums", SUMS, "Sums")}
    if kind == "away":
        return make_changes("agent", world, is_away=True) | {"rollout_env_on_error": "refill"}
    if kind == "agent":
        return {**AGENTS, "rollout_agent": write(world, f"agent_{has_faults}_{is_away}", faults + AGENT, "act")}
    return {**CHANGES, "rollout_env": write(world, f"game_{has_faults}", faults + GAME, "Game")}


def read_responses(run: Path) -> list[dict]:
    """Read the responses of the audit log, in its order."""
    groups = (event for event in loop.read_events(run) if event["event"] == "group")
    return [response for group in groups for response in group["responses"]]


def test_periodic_and_sync_end_in_the_same_weights_where_the_policy_acts(world) -> None:
    compare_schedules(world, "acting", 2, [51], **make_changes("environment", world))
    run = world.folder / "acting-51" / "run"
    report = verify(run)
    assert not report.breaches
    responses = read_responses(run)
    turns = [sum(span[0] != "environment" for span in response["spans"]) for response in responses]
    assert set(turns) == {1, 2, 3}
    assert {response["finish_reason"] for response in responses} == {"stop", "limit", "length"}
    given = sum(span[2] - span[1] for one in responses for span in one["spans"] if span[0] == "environment")
    lines = read_metrics(run)
    assert sum(line["tokens"]["environment"] for line in lines) == given > 0
    sampled = sum(response["num_tokens"] for response in responses) - given
    assert sum(line["tokens"]["response"] for line in lines) == sampled
    limited = sum(response["finish_reason"] == "limit" for response in responses) / len(responses)
    assert sum(line["responses"]["limit"] for line in lines) / len(lines) == pytest.approx(limited)
    assert all(line["time"]["environment_mean"] > 0 and line["responses"]["failed"] == 0 for line in lines)
    (sidecar,) = [process for process in read_trace(run).processes if process.name == "sidecar"]
    steps = [span for one in sidecar.windows for span in one.spans if span.details.get("call") == "step"]
    # Those of a turn that no token was left after are not called.
    assert len(steps) == sum(turns) - sum(response["finish_reason"] == "length" for response in responses)
    samples = [one for line in read_lines(run / "samples.jsonl") for one in line["responses"]]
    assert any([turn["by"] for turn in one.get("turns", ())] == ["policy", "environment", "policy"] for one in samples)


def test_a_conversation_whose_environment_fails_ends_alone_and_gets_the_reward_for_failures(world) -> None:
    folder = world.folder / "faults"
    changes = make_changes("environment", world, has_faults=True)
    loop.run(folder, 1, world.words("faults", **changes, rollout_env_on_error=-2.0, train_iters=5))
    run = world.folder / "runs" / "faults"
    assert not verify(run).breaches
    failed = [one for one in read_responses(run) if one["finish_reason"] == "failed"]
    assert {one["reward"] for one in failed} == {-2.0}
    assert all(one["spans"][-1][0] != "environment" for one in failed)
    said = (run / "sidecar.log").read_text()
    # The fourth game ends its process, with all conversations in it: the others begin again.
    assert "RuntimeError: the third game is broken" in said
    assert "its process ended with exit code 9" in said
    assert len(failed) <= 8


@pytest.mark.slow
def test_periodic_and_sync_end_in_the_same_weights_where_agents_act(world) -> None:
    compare_schedules(world, "agents", 2, [71], **make_changes("agent", world))
    run = world.folder / "agents-71" / "run"
    assert not verify(run).breaches
    responses = read_responses(run)
    assert {one["finish_reason"] for one in responses} <= {"stop", "length"}
    assert all({"sum", "turns"} <= line["reward"].keys() for line in read_metrics(run))
    assert all(len(one["spans"]) >= 3 for one in responses)


@pytest.mark.each_change
def test_agents_that_fail_end_alone_and_every_group_is_trained_on_once(world) -> None:
    folder = world.folder / "faulty-agents"
    changes = make_changes("agent", world, has_faults=True)
    loop.run(folder, 1, world.words("faulty-agents", **changes, rollout_env_on_error=-2.0, train_iters=5))
    run = world.folder / "runs" / "faulty-agents"
    assert not verify(run).breaches
    failed = [one for one in read_responses(run) if one["finish_reason"] == "failed"]
    assert {one["reward"] for one in failed} == {-2.0}
    assert "RuntimeError: the third agent is broken" in (run / "sidecar.log").read_text()
    assert "its process ended with exit code 9" in (run / "sidecar.log").read_text()
    events = loop.read_events(run)
    groups = [(event["version"], event["prompt"]) for event in events if event["event"] == "group"]
    assert len(groups) == len({*groups}) == 5 * 8


@pytest.mark.each_change
@pytest.mark.parametrize("treatment", [pytest.param("exclude", marks=pytest.mark.slow), "refill"])
def test_periodic_and_sync_end_in_the_same_weights_where_agents_fail(world, treatment: str) -> None:
    changes = make_changes("agent", world, is_away=True) | {"rollout_env_on_error": treatment}
    compare_schedules(world, treatment, 2, [72], **changes)
    run = world.folder / f"{treatment}-72" / "run"
    report = verify(run)
    assert not report.breaches
    responses, lines = read_responses(run), [line["responses"] for line in read_metrics(run)]
    unscored = [one for one in responses if one["reward"] is None]
    assert {*report.count_failures()[0]} <= {"raised", "dropped"}
    assert sum(line.get("failures", {}).get("raised", 0) for line in lines) == report.count_failures()[0]["raised"]
    assert sum(line["count"] for line in lines) == len(responses) - len(unscored)
    refilled = sum(line.get("refilled", {}).get("raised", 0) for line in lines)
    assert refilled == sum(len(one.get("refilled", ())) for one in responses)
    if treatment == "refill":
        assert refilled > 10 > len(unscored)
    else:
        assert len(unscored) > 10 > refilled == 0
        assert any("OSError: its tool's host is away" in line.get("failure", "") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "changes"),
    [
        ("tp2", {"tensor_model_parallel_size": 2, "sequence_parallel": True, "grpo_kl_beta": 0.05}),
        ("pp2", {"pipeline_model_parallel_size": 2, "grpo_aggregation": "sequence", "global_batch_size": 16}),
        ("cp2", {"context_parallel_size": 2, "micro_batch_size": 2}),
    ],
)
def test_a_slot_without_a_scored_response_is_computed_in_each_layout(
    world, folder: str, changes: dict[str, Any]
) -> None:
    # Every response to the rows whose answer is 3 fails.
    changes = {**make_changes("agent", world, has_faults=True), "rollout_env_on_error": "exclude", **changes}
    loop.run(world.folder / folder, 2, world.words(folder, **changes, train_iters=4))
    run = world.folder / "runs" / folder
    assert not verify(run).breaches
    lines = read_metrics(run)
    assert sum(line["responses"].get("unscored_groups", 0) for line in lines) > 0
    assert all(0 < line["gradient_norm"] < 100 for line in lines)


@pytest.mark.each_change
def test_periodic_and_sync_end_in_the_same_weights_where_the_policy_calls_tools(chats) -> None:
    compare_schedules(chats, "tools", 1, [51], **make_changes("tools", chats))
    run = chats.folder / "tools-51" / "run"
    assert not verify(run).breaches
    turns = [sum(span[0] != "environment" for span in one["spans"]) for one in read_responses(run)]
    assert set(turns) == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "kill"),
    [
        # Turns take up to 0.15 s, so that many conversations have begun and not ended.
        ("environment", "rank"),
        ("environment", "sidecar"),
        ("agent", "rank"),
        ("agent", "sidecar"),
        ("tools", "sidecar"),
        ("away", "rank"),
        ("away", "sidecar"),
    ],
)
def test_a_run_killed_while_the_policy_acts_resumes_as_if_it_had_not_been(world, chats, kind: str, kill: str) -> None:
    here, place = chats if kind == "tools" else world, f"{kind}-{kill}"
    changes = {**make_changes(kind, here), "rollout_script": script(here, 81 if kind in ("agent", "away") else 61)}
    whole = resume.uninterrupted(here, f"whole-{place}", 1, **changes)
    folder = resume.killed(here, f"killed-{place}", 1, {0: resume.fault("generation", kill)}, **changes)
    resume.resumed(here, folder, 1, **changes)
    resume.assert_same(folder, whole)


@pytest.mark.each_change
def test_rollouts_of_an_environment_server_are_trained_on(tmp_path: Path) -> None:
    world, address = loop.make_world(tmp_path), f"ipc://{make_socket_folder() / 's'}"
    server = subprocess.Popen([sys.executable, Path(__file__).with_name("verifiers_server.py"), address])
    try:
        loop.run(tmp_path / "run", 1, world.words("run", **AGENTS, rollout_verifiers=address, train_iters=2))
    finally:
        server.kill()
        server.wait()
    run = world.folder / "runs" / "run"
    assert not verify(run).breaches
    responses = read_responses(run)
    assert {response["finish_reason"] for response in responses} <= {"stop", "length"}
    assert all(len(response["spans"]) >= 3 for response in responses)
    assert all(0 < line["reward"]["sum"] < 3 for line in read_metrics(run))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_periodic_and_sync_end_in_the_same_weights_with_credit_for_turns(world) -> None:
    changes = {
        **CHANGES, "rollout_env": write(world, "credited", CREDITED_GAME, "Game"), "rollout_max_tokens": 60,
        "seq_length": 128, "grpo_turn_credit": True, "grpo_group_size": 4, "micro_batch_size": 2,
    }  # fmt: skip
    compare_schedules(world, "credited", 2, [51], **changes)
    run = world.folder / "credited-51" / "run"
    responses = [one for line in read_lines(run / "samples.jsonl") for one in line["responses"]]
    assert responses
    for response in responses:
        rewards = [turn["reward"] for turn in response["turns"] if turn["by"] == "policy"]
        assert response["advantage"] is None
        is_whole = response["finish_reason"] == "stop"
        assert not is_whole or response["reward"] == pytest.approx(0.25 + sum(rewards))
    assert any(line["gradient_norm"] > 0 for line in read_metrics(run) if "gradient_norm" in line)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_calls_that_vllms_parsers_read_reach_an_agent_whose_history_is_not_tokenized_again(tmp_path: Path) -> None:
    calculator.warm_up(tmp_path / "model", 0, num_steps=150)
    calculator.write_rows(tmp_path, 0)
    (tmp_path / "agent.py").write_text(AGENT_WITH_TOOL)
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
