"""Whole runs in which the policy acts in environments, over scripted engines."""

import json
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.trace import read_trace
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_check import verify
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
CHANGES = {
    "reward": None, "reward_workers": None, "rollout_env_max_turns": 3, "rollout_max_tokens": 40, "log_samples": 32,
    "rollout_env_workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("environments"))


def write_game(world: loop.World, has_faults: bool = False) -> str:
    path = world.folder / f"game_{has_faults}.py"
    path.write_text(f"FAULTS = {has_faults}\n{GAME}")
    return f"{path}:Game"


def read_responses(run: Path) -> list[dict]:
    """Read the responses of the audit log, in its order."""
    events = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    return [response for event in events if event["event"] == "group" for response in event["responses"]]


def test_periodic_and_sync_end_in_the_same_weights_where_the_policy_acts(world) -> None:
    compare_schedules(world, "acting", 2, [51], rollout_env=write_game(world), **CHANGES)
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
    changes = {"rollout_env": write_game(world, has_faults=True), "rollout_env_on_error": -2.0, "train_iters": 5}
    words = world.words("faults", **CHANGES, **changes)
    loop.run(folder, 1, words)
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
@pytest.mark.parametrize("kill", ["rank", "sidecar"])
def test_a_run_killed_amid_conversations_resumes_as_if_it_had_not_been(world, kill: str) -> None:
    # Turns take up to 0.15 s, so that many conversations have begun and not ended.
    changes = {**CHANGES, "rollout_env": write_game(world), "rollout_script": script(world, 61)}
    whole = resume.uninterrupted(world, f"whole-{kill}", 1, **changes)
    folder = resume.killed(world, f"killed-{kill}", 1, {0: resume.fault("generation", kill)}, **changes)
    resume.resumed(world, folder, 1, **changes)
    resume.assert_same(folder, whole)
