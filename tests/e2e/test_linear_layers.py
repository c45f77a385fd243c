"""A whole run of GRPO on a model with linear layers, which continues in another layout."""

from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_on_linear_layers_continues_on_other_ranks(tmp_path: Path) -> None:
    types = ["linear_attention", "full_attention"]
    world = loop.World(
        tmp_path,
        loop.draw_model(tmp_path / "model", family="qwen3_5", layer_types=types),
        loop.write_prompts(tmp_path / "prompts.jsonl", 40),
        loop.write_reward(tmp_path / "reward.py"),
    )
    folders = {"save": tmp_path / "save", "load": tmp_path / "save", "save_interval": 1, "save_hf": tmp_path / "hf"}
    loop.run(tmp_path / "stages", 2, world.words("one", pipeline_model_parallel_size=2, exit_interval=2, **folders))
    divided = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    ranks = loop.run(tmp_path / "tensors", 2, world.words("one", **divided, **folders))
    assert "continues from" in ranks.text()
    run = tmp_path / "runs" / "one"
    assert [row["version"] for row in read_metrics(run) if "fingerprint" in row] == [0, 1, 2]
    assert verify(run).breaches == []
