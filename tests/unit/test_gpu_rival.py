"""The rival of `make gpu-bench`: both sides take turns, a side that ends is said, and both get the same work."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_bench
from benchmarks.gpu import parts, rival, rival_trl
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.players import Opponent
from benchmarks.gpu.work import Work

pytestmark = pytest.mark.each_change

# Plays two iterations, notes when each begins, and then ends with an error.
PLAYS = """
import sys
from benchmarks.gpu.players import Player
player = Player(sys.argv[1])
for number in range(2):
    player.begin()
    with open(sys.argv[2], "a") as file:
        file.write(f"{number}\\n")
player.end()
sys.exit("the model is too large")
"""


def test_a_side_plays_only_when_it_is_asked_and_says_why_it_ended(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    command = [sys.executable, "-c", PLAYS]
    with Opponent(lambda pipes: [*command, pipes, str(notes)], tmp_path / "output") as side:
        pass
    assert not notes.exists()
    with (
        Opponent(lambda pipes: [*command, pipes, str(notes)], tmp_path / "output") as side,
        pytest.raises(TimeoutError),
    ):
        # The first iteration ends when the second is asked for.
        side.play(0.0)
    with Opponent(lambda pipes: [*command, pipes, str(notes)], tmp_path / "output") as side:
        assert side.play(100) >= 0
        assert side.play(100) >= 0
        with pytest.raises(RuntimeError, match="the model is too large"):
            side.play(100)


def test_the_rival_without_an_environment_is_left_out_with_the_command_that_makes_one(monkeypatch) -> None:
    monkeypatch.setattr(parts, "find_rival", lambda is_tiny: None)
    reason = gpu_bench.find_reason(PARTS["rival"], gpu_bench.Gpu("", 80), 200, False, lambda name: True)
    assert "trl is not installed: `make rival`" in reason


def test_both_sides_sample_the_same_number_of_responses_of_the_same_length(tmp_path: Path) -> None:
    work = Work(tmp_path / "rows", tmp_path, "0.6b", True, time.monotonic() + 100)
    load = rival.TINY
    settings = rival.make_settings(work, load, tmp_path, tmp_path / "p", "x:y", tmp_path)
    words = rival_trl.make_words(settings, has_liger=True)
    assert (
        words["per_device_train_batch_size"] * words["gradient_accumulation_steps"] * load.response == load.num_tokens
    )
    assert "use_vllm" not in words
    assert json.loads(json.dumps(settings.__dict__))["num_iterations"] == 1 + load.num_rounds


def test_responses_of_another_length_than_ours_end_the_rivals_run() -> None:
    def reward(completions: list[str], **columns: object) -> list[float]:
        return [float(len(columns))] * len(completions)

    checked = rival_trl.require_length(reward, 3)
    assert checked.__name__ == "reward"
    assert checked(completions=["a", "b"], completion_ids=[[1, 2, 3], [4, 5, 6]], answer=1) == [2.0, 2.0]
    with pytest.raises(RuntimeError, match=r"must have 3 tokens, and these have \[2, 3\]"):
        checked(completions=["a", "b"], completion_ids=[[1, 2, 3], [4, 5]])
