"""Whole runs in which agents act with the client of OpenAI, over scripted engines."""

import json
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.e2e import test_resume as resume
from tests.e2e.test_environments import read_responses
from tests.e2e.test_loop import compare_schedules, script

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
CHANGES = {
    "rollout_agent_timeout": 300,
    "reward": None, "reward_workers": None, "rollout_env_max_turns": 3, "rollout_max_tokens": 40, "log_samples": 32,
    "rollout_env_workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("agents"))


def write_agent(world: loop.World, has_faults: bool = False) -> str:
    path = world.folder / f"agent_{has_faults}.py"
    path.write_text(f"FAULTS = {has_faults}\n{AGENT}")
    return f"{path}:act"


def count_lost(run: Path) -> int:
    """Count the agents that ended with their process."""
    return (run / "sidecar.log").read_text().count("its process ended with exit code 9")


@pytest.mark.each_change
def test_periodic_and_sync_end_in_the_same_weights_where_agents_act(world) -> None:
    compare_schedules(world, "agents", 2, [71], rollout_agent=write_agent(world), **CHANGES)
    run = world.folder / "agents-71" / "run"
    assert not verify(run).breaches
    responses = read_responses(run)
    assert {one["finish_reason"] for one in responses} <= {"stop", "length"}
    assert all({"sum", "turns"} <= line["reward"].keys() for line in read_metrics(run))
    assert all(len(one["spans"]) >= 3 for one in responses)


@pytest.mark.each_change
def test_agents_that_fail_end_alone_and_every_group_is_trained_on_once(world) -> None:
    changes = {"rollout_agent": write_agent(world, True), "rollout_env_on_error": -2.0, "train_iters": 5}
    folder = world.folder / "faults"
    loop.run(folder, 1, world.words("faults", **{**CHANGES, **changes}))
    run = world.folder / "runs" / "faults"
    assert not verify(run).breaches
    failed = [one for one in read_responses(run) if one["finish_reason"] == "failed"]
    assert {one["reward"] for one in failed} == {-2.0}
    assert "RuntimeError: the third agent is broken" in (run / "sidecar.log").read_text()
    assert count_lost(run)
    events = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    groups = [(event["version"], event["prompt"]) for event in events if event["event"] == "group"]
    assert len(groups) == len({*groups}) == 5 * 8


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["rank", "sidecar"])
def test_a_run_killed_amid_the_calls_of_agents_resumes_as_if_it_had_not_been(world, kill: str) -> None:
    changes = {**CHANGES, "rollout_agent": write_agent(world), "rollout_script": script(world, 81)}
    whole = resume.uninterrupted(world, f"whole-{kill}", 1, **changes)
    folder = resume.killed(world, f"killed-{kill}", 1, {0: resume.fault("generation", kill)}, **changes)
    resume.resumed(world, folder, 1, **changes)
    resume.assert_same(folder, whole)
