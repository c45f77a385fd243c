"""Whole runs on emulated devices: publishes to scripted engines, updates, checkpoints, exports, and resumes."""

from pathlib import Path
from typing import Any

import pytest

from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop

REHEARSED = """
    import atexit
    from tests.rehearsal import streams
    atexit.register(lambda: print("faults of streams:", streams.state.faults))
"""
FAMILIES = {"EP2": "qwen3_moe"}
# Each layout touches the device in another way than the others.
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "grpo_kl_beta": 0.01, "frozen_offload": True,
            "micro_batch_size": None},
    "PP2": {"pipeline_model_parallel_size": 2, "bf16": True, "grpo_kl_beta": 0.01},
    "DP2": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bf16": True,
            "async_save": True},
    "CP2": {"context_parallel_size": 2, "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1},
    "EP2": {"expert_model_parallel_size": 2, "bf16": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def worlds(tmp_path_factory) -> dict[str, loop.World]:
    dense = loop.make_world(tmp_path_factory.mktemp("dense"))
    folder = tmp_path_factory.mktemp("sparse")
    sparse = loop.World(folder, loop.draw_model(folder / "model", family="qwen3_moe"), dense.prompts, dense.reward)
    return {layout: sparse if layout in FAMILIES else dense for layout in LAYOUTS}


def run(world: loop.World, layout: str, folder: Path, **changes: Any) -> Path:
    """Run four iterations, or those that are left after a checkpoint."""
    words = world.words(
        "run", platform="npu", rollout_folder=folder / "run", train_iters=4, save=folder / "checkpoints",
        save_interval=2, save_hf=folder / "hf", **LAYOUTS[layout], **changes,
    )  # fmt: skip
    ranks = loop.run(folder, 2, words, {0: REHEARSED, 1: REHEARSED}, platform="rehearsed")
    assert all("faults of streams: []" in path.read_text() for path in ranks.outputs), ranks.text()
    is_chosen = any(
        "devices of 16 GiB make --micro-batch-size 4: a group" in path.read_text() for path in ranks.outputs
    )
    assert is_chosen == ("micro_batch_size" in LAYOUTS[layout])
    assert not verify(folder / "run").breaches
    return folder / "run"


@pytest.mark.each_change
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_bit_for_bit_from_its_checkpoint(layout, worlds, tmp_path) -> None:
    whole = run(worlds[layout], layout, tmp_path / "whole")
    later = run(worlds[layout], layout, tmp_path / "later", load=tmp_path / "whole" / "checkpoints", ckpt_step=2)
    fingerprints = [
        {line["version"]: line["fingerprint"] for line in read_lines(path / "metrics.jsonl")} for path in (whole, later)
    ]
    assert fingerprints[1].items() == {(version, fingerprints[0][version]) for version in (2, 3)}
    assert len(set(fingerprints[0].values())) == 4
