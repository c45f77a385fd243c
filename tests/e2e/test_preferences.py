"""Whole runs of --stage dpo: the margin on held-out pairs rises, and a killed run resumes as one that was not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read_metrics, without_times
from tests.e2e import loop
from tests.e2e.test_supervised import KILL

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(900)]

ITERATIONS = 20


def write_pairs(path: Path, count: int) -> Path:
    """Write ragged prompts of numbers, after which a small even number is preferred to an odd one."""
    rows = []
    for row in range(count):
        prompt = " ".join(str((7 * row + 3 * place) % 120 + 2) for place in range(3 + row % 9))
        answers = [f"{(5 * row) % 4 * 2 + 2} {(3 * row) % 100 + 20}", f"{(3 * row) % 4 * 2 + 3}"]
        rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("preferences"))


def words_of(world: loop.World, folder: Path) -> list[str]:
    flags = {
        "hf_model": world.model, "prompts": write_pairs(world.folder / "pairs.jsonl", 96), "seq_length": 64,
        "train_iters": ITERATIONS, "global_batch_size": 16, "micro_batch_size": 4, "lr": 3e-3, "clip_grad": 1.0,
        "prompts_held_out": 16, "eval_interval": 5, "save_interval": 5, "dpo_beta": 0.2,
        "rollout_folder": folder / "run", "save": folder / "save", "load": folder / "save", "save_hf": folder / "hf",
    }  # fmt: skip
    return ["--stage", "dpo", "--use-distributed-optimizer", *loop.to_words(flags)]


@pytest.fixture(scope="module")
def whole(world) -> Path:
    folder = world.folder / "whole"
    loop.run(folder, 2, words_of(world, folder))
    return folder


def test_the_margin_on_pairs_that_are_not_trained_on_rises(whole):
    metrics = read_metrics(whole / "run")
    held_out = [record["evaluation"] for record in metrics if "evaluation" in record]
    # Policy and reference have the same weights at the start.
    assert (held_out[0]["margin"], metrics[0]["preference"]["margin"]) == (0, 0)
    assert held_out[0]["loss"] == pytest.approx(torch.tensor(2.0).log().item())
    margins = [one["margin"] for one in held_out]
    assert margins[-1] > 0.5
    assert held_out[-1]["accuracy"] > 0.9
    assert held_out[-1]["num_pairs"] == 16


def test_a_run_that_was_killed_resumes_as_the_run_that_was_not(world, whole):
    folder = world.folder / "killed"
    words = words_of(world, folder)
    with loop.running(folder, 2, words, {1: KILL}) as ranks:
        assert all(ranks.wait()), ranks.text()
    ranks = loop.run(folder, 2, words)
    assert "continues from" in ranks.text()
    assert without_times(read_metrics(folder / "run")) == without_times(read_metrics(whole / "run"))
    last = Path("hf") / f"iter_{ITERATIONS:07d}" / "model.safetensors"
    ours, theirs = (load_file(one / last) for one in (folder, whole))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
