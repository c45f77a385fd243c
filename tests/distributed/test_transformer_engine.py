"""Layers of TransformerEngine's modules: megatron-core's own classes for them, over a stand-in that runs on a CPU."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl import platforms
from megatron_rl.ops.elementwise import plain, triton_fused
from megatron_rl.ops.qkv import split_heads
from megatron_rl.trainer.mcore.model import self_attention
from megatron_rl.trainer.mcore.model.attention import SharedPromptAttention
from megatron_rl.trainer.mcore.model.gpt import named_shards
from megatron_rl.trainer.mcore.session import start_session as start_session_of
from megatron_rl.trainer.mcore.step.optimizer import apply_update
from tests import hf_models
from tests.distributed.layouts import CASES, Model, build, divisor, start_session
from tests.distributed.parity import Computed, expected, expected_at, shared_loss, shared_packs
from tests.distributed.training import Training, checkpointer, settings_of, training_in
from tests.nursery import WITH_TRANSFORMER_ENGINE
from tests.ranks import run_ranks
from tests.truth import error_over_bound

# Of each model: a norm within each linear layer and norms of heads; biases; experts in one product.
LAYOUTS = {"qwen3": "TP2+SP", "llama_biased": "TP2", "qwen3_moe": "TP2+SP,EP2,ETP1"}
WITH_THEIR_ACTIVATION = ("llama_biased",)
SCALE = 0.01
ADAM = "--lr 0.01 --clip-grad 1.0 --weight-decay 0.1 --lr-decay-style constant"
OPTIMIZERS = {
    "sharded": "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer",
    "whole": "--tensor-model-parallel-size 2",
}
EXTRA = {"version": 1, "run": "a-run", "position": [1, 2], "reference": None}


def compute(folders: dict[str, Path], small: Path, out: Path) -> dict[str, Any]:
    """Compute everything that needs TransformerEngine."""
    torch.distributed.init_process_group("gloo")
    return {"layers": run_layers(folders), "training": take_over(small, out)}


def run_layers(folders: dict[str, Path]) -> dict[str, tuple[Computed, str, str, dict[str, str]]]:
    """Compute two steps of each model; return the second, both kinds of layers' fingerprints, and some modules."""
    results = {}
    for name, folder in folders.items():
        case = dataclasses.replace(CASES[LAYOUTS[name]], fuses_accumulation=True)
        with start_session(case) as session:
            local = build(session, case, folder).weights.fingerprint()
            for kernels in ("torch", "triton") if name == "qwen3" else ("torch",):
                own = dataclasses.replace(case, elementwise_backend=kernels)
                changes = {"moe_grouped_gemm": True, "apply_rope_fusion": True}
                changes["use_te_activation_func"] = name in WITH_THEIR_ACTIVATION
                with stand_ins_for_kernels() as stand_ins:
                    model = build(session, own, folder, qkv_backend=kernels, fusions=fusions_of_cuda(), **changes)
                    packs = shared_packs(divisor(case.sizes))
                    model.forward_backward(packs, shared_loss)
                    log_probs = model.forward_backward(packs, shared_loss)
                assert all(stand_in.called == (kernels == "triton") for stand_in in stand_ins)
                check_marks(model)
                computed = Computed(log_probs, model.gradients())
                results[f"{name} {kernels}"] = computed, local, model.weights.fingerprint(), describe(model)
    return results


def fusions_of_cuda() -> SimpleNamespace:
    """Return what CUDA's platform has with TransformerEngine, and this machine computes with the stand-in."""
    missing = dict(platforms.select("cpu").unsupported_fusions)
    del missing["apply_rope_fusion"], missing["gradient_accumulation_fusion"]
    return SimpleNamespace(name="cuda", unsupported_fusions=missing)


@contextlib.contextmanager
def stand_ins_for_kernels() -> Iterator[tuple[mock.MagicMock, mock.MagicMock]]:
    """Compute in torch what Triton's kernels would."""

    def split(*given: Any, name: str) -> Any:
        return split_heads(*given, name="torch")

    with (
        mock.patch.object(self_attention, "split_heads", side_effect=split) as of_heads,
        mock.patch.object(triton_fused, "swiglu", side_effect=plain.swiglu) as of_swiglu,
    ):
        yield of_heads, of_swiglu


def check_marks(model: Model) -> None:
    """Check that the gradients of linear layers were added in their products, and that nothing else remains."""
    for name, parameter in named_shards(model.chunks):
        is_linear = "linear" in name and "bias" not in name and "layer_norm" not in name
        is_output = parameter is model.chunks[-1].output_weight()
        assert parameter.grad_added_to_main_grad == (is_linear or is_output), name
        assert parameter.grad is None


def describe(model: Model) -> dict[str, str]:
    layer = model.chunks[0].decoder.layers[0]
    core = layer.self_attention.core_attention
    assert isinstance(core, SharedPromptAttention)
    modules = {
        "attention": layer.self_attention, "qkv": layer.self_attention.linear_qkv, "mlp": layer.mlp,
        "norm before": layer.input_layernorm, "last norm": model.chunks[-1].decoder.final_layernorm,
    }  # fmt: skip
    if hasattr(layer.mlp, "experts"):
        modules |= {"experts": layer.mlp.experts, "fc1": layer.mlp.experts.linear_fc1}
    found = {name: type(module).__name__ for name, module in modules.items()}
    return found | {"addition": type(layer.self_attn_bda).__name__}


def train(folder: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Train with Megatron's own layers and torch's Adam, save, and continue."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, words in OPTIMIZERS.items():
        with training_of(folder, words) as trained:
            trained.update(SCALE)
            save(trained, out / f"local-{name}")
            results[name] = {"weights": trained.parameters(), **go_on(trained)}
    return results


def take_over(folder: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Continue with TransformerEngine's layers and Adam; save what was loaded, and before that a new model."""
    results = {}
    for name, words in OPTIMIZERS.items():
        with training_of(folder, words, is_local=False) as trained:
            save(trained, out / f"new-{name}")
            load(trained, out / f"local-{name}")
            save(trained, out / f"engine-{name}")
            results[name] = go_on(trained)
    return results


def return_to(folder: Path, out: Path) -> dict[str, dict[str, Any]]:
    """Continue with Megatron's own layers and torch's Adam again."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, words in OPTIMIZERS.items():
        with training_of(folder, words) as trained:
            load(trained, out / f"new-{name}")
            load(trained, out / f"engine-{name}")
            results[name] = go_on(trained)
    return results


@contextlib.contextmanager
def training_of(folder: Path, words: str, is_local: bool = True) -> Iterator[Training]:
    settings = settings_of(folder, f"{ADAM} {words}")
    config = copy.copy(settings.transformer)
    if not is_local:
        config.transformer_impl = "transformer_engine"
        config.apply_rope_fusion = config.gradient_accumulation_fusion = True
    with start_session_of(settings) as session:
        yield training_in(session, dataclasses.replace(settings, transformer=config))


def save(trained: Training, folder: Path) -> None:
    checkpointer(trained, save=folder).save(1, EXTRA)


def load(trained: Training, folder: Path) -> None:
    with torch.no_grad():
        for _, parameter in named_shards(trained.chunks):
            parameter.fill_(float("nan"))
    assert checkpointer(trained, load=folder).load() is not None


def go_on(trained: Training) -> dict[str, Any]:
    """Return the gradients of one more update, its report, and the weights after it."""
    trained.accumulate()
    gradients = trained.gradients()
    report = apply_update(trained.optimizer, trained.scheduler, trained.wrapped, SCALE)
    trained.policy.synchronize()
    return {"gradients": gradients, "report": report, "after": trained.parameters()}


@pytest.mark.each_change
def test_layers_of_transformer_engine_compute_transformers_gradients_and_share_their_checkpoints(tmp_path) -> None:
    folders = {name: hf_models.draw(name, tmp_path / name, num_hidden_layers=2) for name in LAYOUTS}
    small, out = folders["qwen3"], tmp_path / "out"
    trained = run_ranks(train, 2, small, out)[0]
    found = run_ranks(compute, 2, folders, small, out, platform=WITH_TRANSFORMER_ENGINE)[0]
    returned = run_ranks(return_to, 2, small, out)[0]

    everywhere = {name: expected(folder) for name, folder in folders.items()}
    for case, (ours, local, fingerprint, modules) in found["layers"].items():
        name, kernels = case.split()
        worst = everywhere[name].worst(ours)
        print(f"{case:>18} error / bound: {worst}")
        assert all(error <= 1 for error, _ in worst.values()), case
        assert fingerprint == local, case
        assert modules == expect_modules(name, kernels), case
    for name, own in trained.items():
        compare(own, found["training"][name], small)
        # Nothing has changed on the way through TransformerEngine's optimizer and back.
        assert returned[name]["report"] == own["report"], name
        for what in ("gradients", "after"):
            assert all(torch.equal(value, returned[name][what][tensor]) for tensor, value in own[what].items()), name


def expect_modules(name: str, kernels: str) -> dict[str, str]:
    fused = kernels == "triton"
    wanted = {
        "attention": "FusedSelfAttention" if fused else "SelfAttention", "mlp": "SwigluMLP" if fused else "MLP",
        "qkv": "TELayerNormColumnParallelLinear", "norm before": "IdentityOp", "last norm": "RMSNorm",
        "addition": "function",
    }  # fmt: skip
    if name == "qwen3_moe":
        wanted |= {"mlp": "MoELayer", "experts": "TEGroupedMLP", "fc1": "TEColumnParallelGroupedLinear"}
    return wanted


def compare(own: dict[str, Any], engine: dict[str, Any], folder: Path) -> None:
    """Compare an update by TransformerEngine's layers and optimizer with the same one without."""
    at_saved = expected_at(own["weights"], folder)
    error, tensor = at_saved.worst_gradient(engine["gradients"])
    assert error <= 1, tensor
    theirs, truth = (
        torch.nn.utils.get_total_norm([gradient * SCALE for gradient in gradients.values()])[None]
        for gradients in (at_saved.theirs.gradients, at_saved.truth.gradients)
    )
    assert error_over_bound(torch.full_like(theirs, engine["report"].gradient_norm), theirs, truth) <= 1
    # Adam turns rounding of tiny gradients into whole steps, and a wrong count of steps changes all steps by a third.
    step, difference = (
        torch.cat([(after - own[other][name]).abs().flatten() for name, after in engine["after"].items()]).mean()
        for other in ("weights", "after")
    )
    assert difference < 0.01 * step
