"""An engine that does not compute with the version that it claims ends the run, by name, before an update.

The engines' vLLM is changed (`stale_vllm.py`): what they report of themselves stays right.
"""

import json
import re
from pathlib import Path

import pytest

from megatron_rl.analysis.report.data import RunFiles
from megatron_rl.cli import main as megatron_rl
from megatron_rl.shared.records.audit_chain import BreachName
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import read_fingerprint
from megatron_rl.shared.weights.mapping import Mapping
from tests.e2e import loop, stale_vllm

ITERATIONS = 5


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    folder = tmp_path_factory.mktemp("proved")
    world = loop.make_world(folder)
    loop.draw_model(folder / "wide", head_dim=32)
    return world


def fails(world: loop.World, name: str, plant: dict, expected: str, **changes) -> Path:
    """Run with a changed vLLM; check exit code 5 and this reason; return the run's folder."""
    folder = world.folder / name
    folder.mkdir()
    words = world.words(
        name,
        **{
            "hf_model": world.folder / "wide",
            "rollout_engine": "vllm",
            "rollout_num_engines": 1,
            "rollout_python": stale_vllm.write(folder, plant),
            "rollout_folder": folder / "run",
            "train_iters": ITERATIONS,
            **changes,
        },
    )
    ranks = loop.run(folder, 1, words, code=5)
    (reason,) = re.findall(r"the run ended: (.*)", ranks.text())
    assert re.search(expected, reason), reason
    return folder / "run"


def refused_at(run: Path, name: BreachName) -> int:
    """Return the version that the log says was refused; every one before it was trained on."""
    report = verify(run)
    assert {breach.name for breach in report.breaches} == {name}, report.breaches
    complete = [item.version for item in report.iterations if item.outcome == "complete"]
    assert complete == list(range(len(complete)))
    assert megatron_rl(["audit", str(run)]) == 5
    metrics = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    assert [json.loads(line)["version"] for line in metrics] == complete
    return len(complete)


@pytest.mark.each_change
def test_a_layer_that_keeps_old_tensors_ends_the_run_at_that_publish_whatever_the_learning_rate(world):
    plant = {"where": "load", "names": "layers.1.mlp.up_proj", "from_version": 3}
    expected = "version 3 was not published: engine engine-0, .* do not hold the numbers .*: model.layers.1.mlp.up_proj"
    run = fails(world, "layer", plant, expected, lr=1e-7)
    assert refused_at(run, BreachName.NOT_PROVEN) == 3


@pytest.mark.slow
def test_a_layer_that_keeps_old_adapters_ends_the_run_at_that_publish(world):
    plant = {"where": "adapters", "names": "layers.1.mlp.up_proj.lora_B", "from_version": 3}
    expected = "version 3 was not published: engine engine-0, .* 1 factors of adapters do not hold the numbers"
    run = fails(world, "adapters", plant, expected, lr=1e-6, lora_rank=4, publish_lora="adapter")
    assert refused_at(run, BreachName.NOT_PROVEN) == 3
    (base,) = verify(run).proofs.bases
    assert base == read_fingerprint(world.folder / "wide", Mapping(read_architecture(world.folder / "wide")))


def run_in_bf16(world: loop.World, name: str, **changes) -> Path:
    """Run with --bf16 from a folder of float32, as GPUs train; return its folder."""
    run = world.folder / name / "run"
    of_bf16 = {"bf16": True, "hf_model": world.folder / "wide", "rollout_engine": "vllm", "rollout_num_engines": 1}
    words = world.words(name, **of_bf16, rollout_folder=run, train_iters=2, lr=1e-4, **changes)
    loop.run(run.parent, 1, words)
    return run


def read_compared(run: Path) -> list[tuple[int, int]]:
    """Read the numbers of compared and of all parameters for each iteration: the same in the log and in the metrics."""
    report = verify(run)
    assert not report.breaches
    found = [item.compared for item in report.iterations if item.outcome == "complete"]
    published = [json.loads(line)["publish"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(item["compared"], item["parameters"]) for item in published] == found
    return found


@pytest.mark.each_change
def test_all_parameters_are_compared_where_bf16_is_trained_and_float32_stored(world, capsys):
    run = run_in_bf16(world, "bf16")
    compared = read_compared(run)
    assert len(compared) == 2
    assert all(count == whole > 0 for count, whole in compared), compared
    assert megatron_rl(["audit", str(run)]) == 0
    printed = capsys.readouterr().out
    assert f"{compared[0][1]}/{compared[0][1]}" in printed
    assert "weaker" not in printed


@pytest.mark.slow
def test_a_run_that_accepts_the_weaker_proof_says_so_in_audit_and_report(world, capsys):
    run = run_in_bf16(world, "weaker", publish_dtype="float32", publish_proof="probe")
    compared = read_compared(run)
    assert len(compared) == 2
    assert all(count == 0 < whole for count, whole in compared), compared
    assert megatron_rl(["audit", str(run)]) == 0
    line = "the weaker proof was accepted (--publish-proof probe): in 2 of 2 reports"
    assert line in capsys.readouterr().out
    assert line in RunFiles("weaker", run).read(None, None)["audit"]["weaker"]


IN_FP8 = {
    "publish_dtype": "bfloat16",
    "rollout_dtype": "bfloat16",
    "rollout_vllm_args": "--quantization fp8_per_channel",
}


@pytest.mark.slow
def test_all_parameters_are_compared_where_engines_quantize_and_the_audit_says_so(world, capsys):
    run = run_in_bf16(world, "fp8", **IN_FP8)
    compared = read_compared(run)
    assert len(compared) == 2
    assert all(count == whole > 0 for count, whole in compared), compared
    assert megatron_rl(["audit", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "engines quantize (fp8_per_channel): in 2 of 2 reports" in printed
    assert "weaker" not in printed


@pytest.mark.slow
def test_a_layer_that_keeps_old_quantized_weights_ends_the_run_at_that_publish(world):
    plant = {"where": "quantize", "names": "layers.1.mlp.down_proj", "from_version": 2}
    expected = (
        "version 2 was not published: engine engine-0, .* 1 quantized parameters do not hold what follows from the "
        "loaded numbers: model.layers.1.mlp.down_proj.weight"
    )
    run = fails(world, "quantized", plant, expected, lr=1e-3, **IN_FP8)
    assert refused_at(run, BreachName.NOT_PROVEN) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "names", "version"),
    [
        ("qwen3", "embed_tokens", 1),
        ("qwen3", "layers.0.input_layernorm", 2),
        ("qwen3", "model.norm.weight", 4),
        ("qwen3", "layers.1.self_attn.k_proj", 1),
        ("qwen3_tied", "embed_tokens", 2),
        ("qwen3_moe", "layers.1.mlp.experts.3.down_proj", 2),
        ("qwen3_moe", "layers.0.mlp.gate.weight", 3),
    ],
)
def test_an_engine_that_keeps_any_old_tensor_ends_the_run_at_that_publish(world, family, names, version):
    folder = world.folder / family
    if not folder.exists():
        is_tied = family.endswith("_tied")
        loop.draw_model(folder, family=family.removesuffix("_tied"), head_dim=32, tie_word_embeddings=is_tied)
    plant = {"where": "load", "names": names, "from_version": version}
    expected = f"version {version} was not published: engine engine-0, .* do not hold the numbers .*{re.escape(names)}"
    run = fails(world, f"{names}-{version}", plant, expected, hf_model=folder, lr=1e-6)
    assert refused_at(run, BreachName.NOT_PROVEN) == version


@pytest.mark.slow
def test_an_output_layer_that_keeps_the_embeddings_old_weights_ends_the_run_at_that_publish(world):
    """Take a model of the Llama family: its output layer is one of its own that shares the embedding's parameter."""
    draw = {"family": "llama", "head_dim": 32, "tie_word_embeddings": True}
    folder = loop.draw_model(world.folder / "tied", **draw)
    plant = {"where": "tied", "from_version": 2}
    expected = "version 2 was not published: engine engine-0, .* did not process the loaded weights: lm_head.weight"
    run = fails(world, "output-layer", plant, expected, hf_model=folder, lr=1e-7)
    assert refused_at(run, BreachName.NOT_PROVEN) == 2


@pytest.mark.slow
def test_a_layer_that_computes_with_stale_packed_weights_is_found_by_the_trainers_log_probs(world):
    plant = {"where": "pack", "names": "layers.1.mlp.gate_up_proj", "from_version": 2}
    expected = r"version [23] was not published: engine engine-0: its log-probs of the probe .* --publish-probe-bound"
    run = fails(world, "packed", plant, expected.replace(" --", ".*--"), lr=1e-2)
    assert refused_at(run, BreachName.NOT_PROVEN) in (2, 3)


@pytest.mark.slow
def test_tokens_whose_log_probs_differ_from_the_trainers_are_not_trained_on(world):
    plant = {"where": "sample", "by": 0.125}
    expected = r"iteration 0: the trainer's log-probs differ .* by 0.125 on average, beyond 0.005 \(--rollout-mism"
    run = fails(world, "mismatch", plant, expected)
    assert refused_at(run, BreachName.MISMATCH) == 0


@pytest.mark.slow
def test_the_servers_own_proof_serves_where_vllm_does_not_record_what_sampled_a_token(world):
    folder = world.folder / "no-versions"
    folder.mkdir()
    words = world.words(
        "no-versions",
        hf_model=world.folder / "wide",
        rollout_engine="vllm",
        rollout_num_engines=1,
        rollout_python=stale_vllm.write(folder, {"where": "versions"}),
        rollout_folder=folder / "run",
        train_iters=3,
    )
    loop.run(folder, 1, words)
    report = verify(folder / "run")
    assert not report.breaches
    assert [item.outcome for item in report.iterations] == ["complete"] * 3
