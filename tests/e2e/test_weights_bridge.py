"""Whole runs of models whose family is a user's file."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.errors import ExitCode
from megatron_rl.observe import run_folder
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.weights.families import describe_guest
from tests.distributed.test_weights_bridge import draw_ministral
from tests.e2e import loop
from tests.processes import ROOT

EXAMPLE = ROOT / "examples" / "families" / "ministral.py"


@pytest.fixture
def world(tmp_path: Path) -> loop.World:
    world = loop.make_world(tmp_path, family="mistral")
    # Tensors of both models have the same names.
    config = world.model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "ministral"}))
    return world


@pytest.mark.each_change
def test_a_wrong_family_ends_the_run_before_anything_is_trained(world: loop.World, tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "wrong" / "run"
    wrong = "WRONG = dataclasses.replace(MINISTRAL, constants={'norm_epsilon': 0.1})"
    file.write_text(f"import dataclasses\n{EXAMPLE.read_text()}\n{wrong}\n")
    places = {"weights_bridge": f"{file}:WRONG", "rollout_folder": run}
    ranks = loop.run(run.parent, 1, world.words("run", **places), code=ExitCode.INPUT)
    assert "the model is not transformers' model" in ranks.text()
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_right_family_trains_and_a_changed_file_is_not_resumed(world: loop.World, tmp_path: Path) -> None:
    file, run = tmp_path / "mine.py", tmp_path / "right" / "run"
    shutil.copy(EXAMPLE, file)
    guest, checkpoints = f"{file}:MINISTRAL", tmp_path / "right" / "ckpt"
    words = {"weights_bridge": guest, "rollout_folder": run, "save": checkpoints, "load": checkpoints}

    ranks = loop.run(run.parent, 1, world.words("run", **words, save_interval=1, exit_interval=1))
    assert f"--weights-bridge {guest}: log-probs of 64 tokens are" in ranks.text()
    recorded = run_folder.read_saved_config(run / run_folder.CONFIG_FILE).sections["plug-ins"]
    assert {name: value.text for name, value in recorded.items()} == describe_guest(guest)
    events = loop.read_events(run)
    assert [event["sha256"] for event in events if event["event"] == "plug_ins"] == [describe_guest(guest)]
    assert verify(run).breaches == []

    file.write_text(file.read_text() + "# changed\n")
    ranks = loop.run(run.parent, 1, world.words("run", **words), code=ExitCode.INPUT)
    assert f"--weights-bridge {guest}: the file has changed since" in ranks.text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines_compute_a_family_of_ones_own_by_transformers_and_follow_each_publish(tmp_path: Path) -> None:
    """Train in bfloat16 a model that vLLM has no class of its own for."""
    world = loop.make_world(tmp_path)
    # vLLM wants heads of at least 32 on a CPU.
    draw_ministral(world.model, num_hidden_layers=2, head_dim=32, layer_types=["sliding_attention", "full_attention"])
    run = tmp_path / "run"
    words = world.words(
        "run", weights_bridge=f"{EXAMPLE}:MINISTRAL", rollout_folder=run, bf16=True, rollout_engine="vllm",
        rollout_num_engines=1,
    )  # fmt: skip
    ranks = loop.run(run.parent, 1, words)
    assert "(transformers in bfloat16: " in ranks.text()
    assert "Using Transformers modeling backend" in (run / "logs" / "engine-0.log").read_text()
    report = verify(run)
    assert report.breaches == []
    assert [item.outcome for item in report.iterations] == ["complete"] * 3
    assert all(count == whole > 0 for count, whole in (item.compared for item in report.iterations))
