"""Whole runs with real vLLM: with --batch-invariant, and with an engine that drafts tokens."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ITERATIONS = 3


def run(world: loop.World, name: str, world_size: int, **changes) -> Path:
    """Run to the end; the run's own name, from which seeds follow, is always the same."""
    folder = world.folder / name
    words = world.words(
        "run", rollout_engine="vllm", rollout_num_engines=1, rollout_folder=folder / "run", save_hf=folder / "hf",
        train_iters=ITERATIONS, **changes,
    )  # fmt: skip
    loop.run(folder, world_size, words, OMP_NUM_THREADS="1")
    return folder


def read_differing(folder: Path) -> tuple[list[int], list[int]]:
    """Read how many tokens differ in each iteration, by the metrics and by the audit log."""
    logged = [event["num_differing"] for event in loop.read_events(folder / "run") if event["event"] == "mismatch"]
    return [line["mismatch"]["differing"] for line in read_metrics(folder / "run") if "mismatch" in line], logged


def test_no_token_differs_and_synchronous_and_periodic_runs_sample_and_learn_the_same_bits(tmp_path: Path) -> None:
    """Sample everything again in the second run, with fewer responses at a time and more threads."""
    world = loop.make_world(tmp_path)
    same = {"batch_invariant": True}
    periodic = run(world, "periodic", 2, **same, rollout_max_num_seqs=16, rollout_num_threads=1)
    sync = run(world, "sync", 2, **same, schedule="sync", rollout_max_num_seqs=4, rollout_num_threads=2)
    staged = run(world, "pp2", 2, **same, rollout_max_num_seqs=5, pipeline_model_parallel_size=2)
    for folder in (periodic, sync, staged):
        assert read_differing(folder) == ([0] * ITERATIONS, [0] * ITERATIONS)
        assert not verify(folder / "run").breaches
    ours, theirs = (
        load_file(folder / "hf" / f"iter_{ITERATIONS:07d}" / "model.safetensors") for folder in (periodic, sync)
    )
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_run_whose_engine_drafts_tokens_is_proved_and_trained_as_any_other(tmp_path: Path) -> None:
    world = loop.make_world(tmp_path, head_dim=32)
    folder = run(
        world, "drafts", 1, rollout_speculative="ngram", rollout_speculative_tokens=3, rollout_temperature=0.7
    ) / "run"  # fmt: skip
    report = verify(folder)
    assert not report.breaches
    assert [item.outcome for item in report.iterations] == ["complete"] * ITERATIONS
    assert len([row for row in read_metrics(folder) if "loss" in row]) == ITERATIONS
    log = (folder / "sidecar.log").read_text()
    assert re.search(r"engine engine-0: \d+ of \d+ drafted tokens were accepted \(\d+ %\), with version 0", log)
