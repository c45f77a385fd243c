"""Whole runs of each family on two ranks with scripted engines, which resume, the linear ones in another layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.shared.records.audit_check import verify
from tests import hf_models
from tests.e2e import loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ITERATIONS = 3
EXPERTS: dict[str, Any] = {"expert_model_parallel_size": 2}
# What a family's runs have beside the flags of all; two tensor-parallel ranks where a row has no layout.
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(hf_models.WITH_EXPERTS, EXPERTS),
    "glm4_moe": {**EXPERTS, "moe_router_bias_update_rate": 0.01},
}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def run(world: loop.World, folder: Path, **changes: Any) -> None:
    flags = {
        "rollout_folder": folder / "run", "save": folder / "save", "load": folder / "save", "save_interval": 1,
        "save_hf": folder / "hf", "train_iters": ITERATIONS,
    }  # fmt: skip
    loop.run(folder, 2, world.words("run", **{**flags, **changes}))


@pytest.mark.parametrize("family", hf_models.CONFIGS)
def test_a_run_of_a_family_resumes_as_if_it_had_not_ended(family: str, tmp_path: Path) -> None:
    world = loop.make_world(tmp_path, family=family, num_hidden_layers=4)
    changes = CHANGES.get(family, TENSOR)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run(world, whole, **changes)
    run(world, parted, exit_interval=2, **changes)
    run(world, parted, **changes)
    rows = [read_metrics(folder / "run") for folder in (whole, parted)]
    assert without_times(rows[0]) == without_times(rows[1])
    fingerprints = [row["fingerprint"] for row in rows[0] if "fingerprint" in row]
    assert len(set(fingerprints)) == ITERATIONS
    ours, theirs = (load_file(one / "hf" / f"iter_{ITERATIONS:07d}" / "model.safetensors") for one in (parted, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    if "moe_router_bias_update_rate" in changes:
        before = load_file(world.model / "model.safetensors")
        biases = [name for name in ours if name.endswith("e_score_correction_bias")]
        assert biases
        assert not any(torch.equal(ours[name], before[name]) for name in biases)


def test_a_run_on_linear_layers_continues_on_other_ranks(tmp_path: Path) -> None:
    types = ["linear_attention", "full_attention"]
    world = loop.make_world(tmp_path, family="qwen3_5", layer_types=types)
    folders = {"save": tmp_path / "save", "load": tmp_path / "save", "save_interval": 1, "save_hf": tmp_path / "hf"}
    loop.run(tmp_path / "stages", 2, world.words("one", pipeline_model_parallel_size=2, exit_interval=2, **folders))
    ranks = loop.run(tmp_path / "tensors", 2, world.words("one", **TENSOR, **folders))
    assert "continues from" in ranks.text()
    run = tmp_path / "runs" / "one"
    assert [row["version"] for row in read_metrics(run) if "fingerprint" in row] == [0, 1, 2]
    assert verify(run).breaches == []
