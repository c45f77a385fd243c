"""Whole runs over scripted engines: what is the same whatever the schedule and the arrival, and what ends all ranks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read, without_times
from tests.e2e import loop

ITERATIONS = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("loop"))


def script(world: loop.World, seed: int | None) -> Path:
    """Two engines whose groups come back in an order that the seed draws; without one at once."""
    path = world.folder / f"script-{seed}.json"
    values = (
        {"lengths": [1, 24], "delay": [0.0, 0.15], "delay_seed": seed} if seed is not None else {"lengths": [1, 24]}
    )
    path.write_text(json.dumps(values))
    return path


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "hf" / f"iter_{ITERATIONS:07d}" / "model.safetensors")


def run_to_its_end(world: loop.World, name: str, world_size: int, seed: int | None, **changes) -> Path:
    """A run called `run`, in a folder of its own: seeds of responses follow from a run's name."""
    folder = world.folder / name
    words = world.words(
        "run", rollout_folder=folder / "run", save_hf=folder / "hf", train_iters=ITERATIONS,
        rollout_script=script(world, seed), **changes,
    )  # fmt: skip
    # Two threads: what depends on their number shows.
    loop.run(folder, world_size, words, OMP_NUM_THREADS="2")
    return folder


def share_out_of_order(run: Path) -> float:
    """Of all groups, those that finished after one whose prompt comes later."""
    events = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    order = [event["prompt"] for event in events if event["event"] == "group"]
    assert order
    latest, late = -1, 0
    for position, prompt in enumerate(order):
        latest = -1 if position % 8 == 0 else latest
        late += prompt < latest
        latest = max(latest, prompt)
    return late / len(order)


def assert_same_runs(one: Path, other: Path) -> None:
    """Bit for bit, the weights at the end and every metric that is no time."""
    ours, theirs = final_weights(one), final_weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    left, right = (without_times(read(folder / "run")) for folder in (one, other))
    assert left == right


def compare_schedules(world: loop.World, name: str, world_size: int, seeds: list[int], **changes) -> None:
    sync = run_to_its_end(world, f"{name}-sync", world_size, None, schedule="sync", **changes)
    before = load_file(world.model / "model.safetensors")
    for key, tensor in final_weights(sync).items():
        assert (tensor - before[key]).norm() > 1e-3 * before[key].norm(), key
    for seed in seeds:
        periodic = run_to_its_end(world, f"{name}-{seed}", world_size, seed, **changes)
        share = share_out_of_order(periodic / "run")
        print(f"{name}, seed {seed}: {share:.0%} of the groups finished out of order")
        assert share >= 1 / 3
        assert_same_runs(periodic, sync)


def test_periodic_and_sync_end_in_the_same_weights_whatever_the_arrival(world):
    compare_schedules(world, "dp2", 2, [0], use_distributed_optimizer=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_periodic_and_sync_end_in_the_same_weights_for_twenty_arrivals(world):
    compare_schedules(world, "one", 1, list(range(1, 15)))
    compare_schedules(world, "pp2", 2, [15, 16, 17], pipeline_model_parallel_size=2, grpo_kl_beta=0.05)
    compare_schedules(
        world, "tp2", 2, [18, 19, 20], tensor_model_parallel_size=2, sequence_parallel=True, global_batch_size=16
    )
