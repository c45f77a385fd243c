"""Runs with --batch-invariant and real vLLM: no token's log-prob differs, so the order of work changes nothing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ITERATIONS = 3


def run(world: loop.World, name: str, world_size: int, **changes) -> Path:
    """Run to the end; the run's own name, from which seeds follow, is always the same."""
    folder = world.folder / name
    words = world.words(
        "run",
        batch_invariant=True,
        rollout_engine="vllm",
        rollout_num_engines=1,
        rollout_folder=folder / "run",
        save_hf=folder / "hf",
        train_iters=ITERATIONS,
        **changes,
    )
    loop.run(folder, world_size, words, OMP_NUM_THREADS="1")
    return folder


def read_differing(folder: Path) -> tuple[list[int], list[int]]:
    """Read how many tokens differ in each iteration, by the metrics and by the audit log."""
    metrics, audit = (
        [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "audit.jsonl")
    )
    logged = [event["num_differing"] for event in audit if event["event"] == "mismatch"]
    return [line["mismatch"]["differing"] for line in metrics if "mismatch" in line], logged


def test_no_token_differs_and_synchronous_and_periodic_runs_sample_and_learn_the_same_bits(tmp_path: Path) -> None:
    """Sample everything again in the second run, with fewer responses at a time and more threads."""
    world = loop.make_world(tmp_path)
    periodic = run(world, "periodic", 2, rollout_max_num_seqs=16, rollout_num_threads=1)
    sync = run(world, "sync", 2, schedule="sync", rollout_max_num_seqs=4, rollout_num_threads=2)
    staged = run(world, "pp2", 2, rollout_max_num_seqs=5, pipeline_model_parallel_size=2)
    for folder in (periodic, sync, staged):
        assert read_differing(folder) == ([0] * ITERATIONS, [0] * ITERATIONS)
        assert not verify(folder / "run").breaches
    ours, theirs = (
        load_file(folder / "hf" / f"iter_{ITERATIONS:07d}" / "model.safetensors") for folder in (periodic, sync)
    )
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
