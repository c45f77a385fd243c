"""Whole runs of --stage sft: after a kill, beside a plain loop, and on into GRPO."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.analysis.ledger import compute_ledger
from megatron_rl.config.settings import DataConfig
from megatron_rl.observe import run_folder, trace
from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.trainer.data.demonstrations import load_demonstrations
from tests import hf_models
from tests.e2e import loop
from tests.supervised_twin import Row, Rules, Twin
from tests.truth import error_over_bound, worst_of

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(900)]

ITERATIONS, BATCH, SEED = 20, 8, 7
HELD_OUT = 5
RULES = Rules(num_steps=ITERATIONS, num_rising=4, rate=3e-3, least_rate=3e-4)
LAST = f"iter_{ITERATIONS:07d}"
# A rank runs this before it begins: it dies after 12 steps of the optimizer, between two checkpoints.
KILL = """
import os, signal
from megatron_rl import platforms
platforms.select("cpu").install()
from megatron_rl.trainer.mcore.step.policy import Policy
inner, calls = Policy.update, []
def update(self, scale):
    result = inner(self, scale)
    calls.append(1)
    if len(calls) == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return result
Policy.update = update
"""


def write_pairs(path: Path, count: int) -> Path:
    """Write ragged prompts of numbers, and completions."""
    rows = [
        {
            "prompt": " ".join(str((7 * row + 3 * place) % 120 + 2) for place in range(3 + row % 9)),
            "completion": " ".join(str((5 * row + place) % 120 + 2) for place in range(1 + row % 6)),
        }
        for row in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("supervised"))


@pytest.fixture(scope="module")
def pairs(world) -> Path:
    """Write pairs of which an update takes exactly a quarter of an epoch."""
    return write_pairs(world.folder / "pairs.jsonl", 35)


def words_of(world: loop.World, pairs: Path, folder: Path) -> list[str]:
    flags = {
        "hf_model": world.model, "prompts": pairs, "seq_length": 64, "train_iters": ITERATIONS, "seed": SEED,
        "global_batch_size": BATCH, "micro_batch_size": 2, "lr": RULES.rate, "min_lr": RULES.least_rate,
        "lr_decay_style": "cosine", "lr_warmup_iters": RULES.num_rising, "weight_decay": RULES.weight_decay,
        "clip_grad": RULES.clip_norm, "prompts_held_out": HELD_OUT, "eval_interval": 6, "save_interval": 5,
        "rollout_folder": folder / "run", "save": folder / "save", "load": folder / "save", "save_hf": folder / "hf",
    }  # fmt: skip
    return ["--stage", "sft", "--use-distributed-optimizer", *loop.to_words(flags)]


@pytest.fixture(scope="module")
def whole(world, pairs) -> Path:
    """Run on two ranks to the end, without a kill."""
    folder = world.folder / "whole"
    loop.run(folder, 2, words_of(world, pairs, folder))
    return folder


def test_a_run_that_was_killed_resumes_as_the_run_that_was_not(world, pairs, whole):
    folder = world.folder / "killed"
    words = words_of(world, pairs, folder)
    with loop.running(folder, 2, words, {1: KILL}) as ranks:
        assert all(ranks.wait()), ranks.text()
    assert (folder / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "10"
    ranks = loop.run(folder, 2, words)
    assert "continues from" in ranks.text()
    assert without_times(read_metrics(folder / "run")) == without_times(read_metrics(whole / "run"))
    assert run_folder.read_saved_config(folder / "run" / run_folder.CONFIG_FILE).sections["run"]["stage"].text == "sft"
    ours, theirs = (load_file(one / "hf" / LAST / "model.safetensors") for one in (folder, whole))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_run_with_nothing_left_to_do_says_so_and_builds_no_model(world, pairs, whole):
    before = (whole / "run" / "metrics.jsonl").read_text()
    ranks = loop.run(whole, 2, words_of(world, pairs, whole))
    assert f"{whole / 'save' / LAST} already holds iteration {ITERATIONS} of --train-iters" in ranks.text()
    assert "model: built" not in ranks.text()
    assert (whole / "run" / "metrics.jsonl").read_text() == before


def test_a_run_equals_a_plain_loop_over_the_same_rows(world, pairs, whole):
    config = DataConfig(prompts=[pairs], held_out=HELD_OUT)
    source = load_demonstrations(config, world.model, seed=SEED, longest=64, vocab_size=hf_models.VOCAB_SIZE)
    updates: list[list[Row]] = [
        [[[turn.tolist() for turn in turns] for turns in one.sequences] for one in source.take(BATCH)]
        for _ in range(ITERATIONS)
    ]
    twins = [Twin(world.model, dtype) for dtype in (torch.float32, torch.float64)]
    (theirs, their_weights), (truth, true_weights) = (twin.train(updates, RULES) for twin in twins)
    *metrics, last = read_metrics(whole / "run")
    losses = torch.tensor([line["loss"] for line in metrics])
    found = {"losses": error_over_bound(losses, theirs, truth)}
    error, tensor = worst_of(load_file(whole / "hf" / LAST / "model.safetensors"), their_weights, true_weights)
    found[tensor] = error
    distance = (losses - truth).abs().max().item()
    print(
        f"20 steps: error / bound: {found}; losses are off by {distance:.1e}, from {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    assert max(found.values()) <= 1
    assert distance < 1e-5
    assert [line["learning_rate"] for line in metrics] == pytest.approx([RULES.rate_of(step) for step in range(20)])
    assert losses[-1] < losses[0] - 1
    assert metrics[-1]["epochs"] == source.epochs == ITERATIONS * BATCH / source.num_rows
    held_out = [[[turn.tolist() for turn in turns] for turns in one.sequences] for one in source.held_out()]
    with torch.no_grad():
        expected = twins[1].losses(held_out).mean().item()
    assert last["version"] == ITERATIONS
    assert last["evaluation"]["loss"] == pytest.approx(expected, abs=1e-4)
    assert [line["version"] for line in metrics if "evaluation" in line] == [0, 6, 12, 18]


def test_adapters_learn_from_demonstrations_and_all_other_weights_stay(world, pairs):
    folder = world.folder / "adapters"
    own = ["--lora-rank", "8", "--lora-targets", "q_proj", "down_proj", "--lr", "0.03"]
    loop.run(folder, 2, [*words_of(world, pairs, folder), *own])
    metrics = read_metrics(folder / "run")
    assert metrics[-2]["loss"] < metrics[0]["loss"] - 0.1
    merged, base = load_file(folder / "hf" / LAST / "model.safetensors"), load_file(world.model / "model.safetensors")
    changed = {name for name, tensor in base.items() if not torch.equal(merged[name], tensor)}
    assert changed == {name for name in base if ".q_proj.weight" in name or ".down_proj.weight" in name}
    assert (folder / "hf" / f"{LAST}_adapter" / "adapter_model.safetensors").exists()


def test_a_run_leaves_its_configuration_and_what_every_rank_did_when(whole):
    config = run_folder.read_saved_config(whole / "run" / run_folder.CONFIG_FILE)
    assert ("stage", "sft", "--stage sft") in {given[1:] for given in run_folder.list_given(config)}
    assert config.num_engine_devices is None
    found = trace.read_trace(whole / "run")
    assert [*found.versions] == [*range(ITERATIONS + 1)]
    for account in compute_ledger(found):
        assert sum(account.seconds.values()) == pytest.approx(account.wall)
        assert account.details["busy: forward policy"] > 0
        assert account.details["busy: backward policy"] > 0
        assert account.seconds["evaluation"] > 0
        assert not {"first", "starved", "tail", "publish"} & {cause for cause, time in account.seconds.items() if time}


def test_the_checkpoint_and_the_folder_of_weights_lead_to_the_same_grpo(world, whole):
    fingerprints = []
    for name, changes in (
        ("checkpoint", {"load": whole / "save", "finetune": True}),
        ("weights", {"hf_model": whole / "hf" / LAST}),
    ):
        folder = world.folder / name
        words = world.words("grpo", rollout_folder=folder / "grpo", train_iters=2, save=folder / "save", **changes)
        loop.run(folder, 1, words)
        lines = read_metrics(folder / "grpo")
        assert [line["version"] for line in lines] == [0, 1]
        assert (folder / "save" / "iter_0000002").is_dir()
        fingerprints.append([line["fingerprint"] for line in lines])
    # Both begin with the weights that the demonstrations led to, and take the same step.
    assert fingerprints[0] == fingerprints[1]
