"""A whole run whose turns have rewards and advantages of their own."""

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.append_file import read_lines
from tests.e2e import loop
from tests.e2e.test_loop import compare_schedules

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GAME = """
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


def test_periodic_and_sync_end_in_the_same_weights_with_credit_for_turns(tmp_path) -> None:
    world = loop.make_world(tmp_path)
    (tmp_path / "game.py").write_text(GAME)
    changes = {
        "reward": None, "reward_workers": None, "rollout_env": f"{tmp_path / 'game.py'}:Game",
        "rollout_env_workers": 1, "rollout_env_max_turns": 3, "rollout_max_tokens": 60, "seq_length": 128,
        "log_samples": 32, "grpo_turn_credit": True, "grpo_group_size": 4, "micro_batch_size": 2,
    }  # fmt: skip
    compare_schedules(world, "credited", 2, [51], **changes)
    run = tmp_path / "credited-51" / "run"
    responses = [one for line in read_lines(run / "samples.jsonl") for one in line["responses"]]
    assert responses
    for response in responses:
        rewards = [turn["reward"] for turn in response["turns"] if turn["by"] == "policy"]
        assert response["advantage"] is None
        is_whole = response["finish_reason"] == "stop"
        assert not is_whole or response["reward"] == pytest.approx(0.25 + sum(rewards))
    assert any(line["gradient_norm"] > 0 for line in read_metrics(run) if "gradient_norm" in line)
