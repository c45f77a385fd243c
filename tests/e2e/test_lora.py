"""Runs that train adapters, with a divergence from the reference, which is their base."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import read_fingerprint
from megatron_rl.shared.weights.mapping import Mapping
from tests.e2e import loop
from tests.e2e.test_resume import assert_same, fault, killed, resumed, uninterrupted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LORA = {"lora_rank": 4, "lr": 3e-2, "grpo_kl_beta": 0.1}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("lora"))


def test_a_killed_run_of_adapters_resumes_as_if_it_had_not_been(world: loop.World) -> None:
    """Let an iteration have two updates, so that the old policy's adapters count."""
    changes = {**LORA, "pipeline_model_parallel_size": 2, "global_batch_size": 16}
    whole = uninterrupted(world, "whole", 2, **changes)
    folder = killed(world, "killed", 2, {1: fault("backward", "rank", call=10)}, **changes)
    resumed(world, folder, 2, **changes)
    assert_same(folder, whole)
    names = [f"iter_{number:07d}_adapter/adapter_model.safetensors" for number in (1, 4)]
    first, last, again = (
        load_file(one) for one in (*(whole / "hf" / name for name in names), folder / "hf" / names[1])
    )
    assert all(last[name].equal(again[name]) for name in last)
    assert not any(last[name].equal(first[name]) for name in last)
    assert_converts(world, whole)
    separate = uninterrupted(world, "separate", 2, **changes, tri_model="separate")
    assert_near(separate, whole)


def test_a_run_that_publishes_adapters_alone_resumes_and_waits_for_all_groups_alike(world: loop.World) -> None:
    changes = {**LORA, "publish_lora": "adapter", "consume_order": "prompt"}
    whole = uninterrupted(world, "alone", 1, **changes)
    folder = killed(world, "alone-killed", 1, {0: fault("backward", "rank", call=6)}, **changes)
    resumed(world, folder, 1, **changes)
    assert_same(folder, whole)
    assert_same(uninterrupted(world, "alone-sync", 1, **changes, schedule="sync"), whole)
    report = verify(whole / "run")
    assert report.proofs.bases == [read_fingerprint(world.model, Mapping(read_architecture(world.model)))]
    assert not report.breaches


def assert_converts(world: loop.World, whole: Path) -> None:
    """Check that a checkpoint of adapters and its base become the merged weights that the run wrote."""
    words = ["--platform", "cpu", "--hf-model", world.model, "--load", whole / "save", "--lora-rank", "4"]
    loop.call_cli(whole / "convert", "convert", *words, "--save-hf", whole / "converted")
    ours, theirs = (load_file(one / "model.safetensors") for one in (whole / "converted", whole / "hf/iter_0000004"))
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


def assert_near(folder: Path, whole: Path) -> None:
    """Compare the losses of runs that compute roles in another order."""
    ours, theirs = ([row["loss"] for row in read_metrics(one / "run") if "loss" in row] for one in (folder, whole))
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
