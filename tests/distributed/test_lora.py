"""Adapters against a dense model whose update is restricted to their factors, in each layout.

The dense model has the weights base + scale B A, and the gradient G of them. By definition the gradients of the factors
are scale G A^T and scale B^T G. The numbers are such that the sum is exact in float32.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.shared.weights.adapters import name_factors
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.files import read_fingerprint
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.mapping import Mapping, TensorSpec
from megatron_rl.trainer.mcore.session import start_session
from megatron_rl.trainer.mcore.step.optimizer import apply_update
from tests import hf_models
from tests.distributed.layouts import divisor
from tests.distributed.parity import Computed, Expected, expected_at, shared_loss, shared_packs
from tests.distributed.training import LAYOUTS, Training, settings_of, training_in
from tests.nursery import WITH_TRANSFORMER_ENGINE
from tests.ranks import run_ranks

RANK, ALPHA = 4, 8.0
LORA = f"--lora-rank {RANK} --lora-alpha {ALPHA:g} --lr 1e-3"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SP_EXPERTS = f"{LAYOUTS['TP2+SP']} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
CASES = {
    "qwen3": {
        **{name: LAYOUTS[name] for name in ("TP2", "TP2+SP", "PP2", "DP2+overlap")},
        "CP2, recomputed": f"--context-parallel-size 2 {FULL}",
    },
    "qwen3_moe": {"EP2": LAYOUTS["EP2"], "TP2+SP,EP2,ETP1": SP_EXPERTS},
    "deepseek_v3": {"TP2+SP,EP2,ETP1": SP_EXPERTS, "PP2xVPP2": LAYOUTS["PP2xVPP2"]},
}
ENGINE = "TransformerEngine"
# A norm within the layers of queries and of MLPs, and experts in one product.
WITH_ENGINE = {
    "qwen3_moe": {f"{ENGINE}, qwen3_moe": SP_EXPERTS},
    "qwen3": {f"{ENGINE}, TP2": LAYOUTS["TP2"], f"{ENGINE}, TP2+SP": LAYOUTS["TP2+SP"]},
}
# Two virtual stages of two ranks.
NUM_LAYERS = {"deepseek_v3": 4}


@dataclasses.dataclass(frozen=True)
class Found:
    """The results of a layout."""

    computed: Computed
    merged: str
    """The fingerprint of the merged weights."""
    alone: str
    """The fingerprint of the adapters that engines get alone."""
    norm: float
    """The norm of all gradients, as the optimizer clips it."""


def fill(training: Training) -> None:
    """Give the factors multiples of 1/8, by name alone."""
    assert training.base is not None
    shapes = {spec.name: spec.shape for spec in training.base.adapters.mapping.manifest("float32")}
    for shard in training.base.adapters.shards:
        (piece,) = shard.map.pieces
        whole = draw_factor(piece.name, shapes[piece.name])
        shard.parameter.detach().copy_(whole.narrow(piece.dim, piece.source, piece.length))


def draw_factor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 31 + len(name))
    return torch.randint(-1, 2, shape, generator=generator) / 8


def gather_factors(training: Training, attribute: str) -> dict[str, torch.Tensor]:
    """Return an attribute of all factors under PEFT's names, on every rank."""
    assert training.base is not None
    pieces = [
        (shard.map.pieces[0], getattr(shard.parameter, attribute).clone())
        for shard in training.base.adapters.shards
        if shard.map.owned
    ]
    shapes = {spec.name: spec.shape for spec in training.base.adapters.mapping.manifest("float32")}
    whole = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for of_rank in training.session.gather(pieces):
        for piece, values in of_rank:
            whole[piece.name].narrow(piece.dim, piece.source, piece.length).copy_(values)
    return whole


@contextlib.contextmanager
def begin(folder: Path, words: str, name: str) -> Iterator[Training]:
    """Set up the training, with layers of TransformerEngine if the case's name says so."""
    settings = settings_of(folder, words)
    if name.startswith(ENGINE):
        changes = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": "qwen3_moe" in name}
        config = copy.copy(settings.transformer)
        vars(config).update(changes, gradient_accumulation_fusion=True)
        settings = dataclasses.replace(settings, transformer=config)
    with start_session(settings) as session:
        yield training_in(session, settings)


def compute(folder: Path, cases: dict[str, str]) -> dict[str, Found]:
    torch.distributed.init_process_group("gloo")
    found = {}
    for name, words in cases.items():
        with begin(folder, f"{words} {LORA}", name) as trained:
            fill(trained)
            log_probs = trained.forward_backward(shared_packs(divisor(trained.session.sizes)), shared_loss)
            gradients = gather_factors(trained, "main_grad")
            merged = trained.weights.fingerprint()
            assert trained.base is not None
            alone = trained.base.weights.without_base(trained.base.adapters, None).fingerprint()
            norm = apply_update(trained.optimizer, trained.scheduler, trained.wrapped, 1.0).gradient_norm
            found[name] = Found(Computed(log_probs, gradients), merged, alone, norm)
    return found


def draw_base(name: str, folder: Path) -> Path:
    """Draw a model whose weights are exact in bfloat16, stored in float32."""
    hf_models.draw(name, folder, num_hidden_layers=NUM_LAYERS.get(name, 2))
    path = folder / "model.safetensors"
    save_file({key: value.bfloat16().float() for key, value in load_file(path).items()}, path, {"format": "pt"})
    return folder


def list_factors(weights: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Draw A and B for each adapted weight."""
    found = {}
    for name, weight in weights.items():
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            a, b = name_factors(name.removesuffix(".weight"))
            found[name] = draw_factor(a, (RANK, weight.shape[1])), draw_factor(b, (len(weight), RANK))
    return found


def merge(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    merged = dict(weights)
    for name, (a, b) in list_factors(weights).items():
        exact = weights[name].double() + ALPHA / RANK * b.double() @ a.double()
        merged[name] = exact.float()
        assert merged[name].double().equal(exact)
    return merged


def restrict(dense: Computed, weights: dict[str, torch.Tensor]) -> Computed:
    """Return the gradients of the factors that follow from those of the dense weights."""
    gradients = {}
    for name, (a, b) in list_factors(weights).items():
        gradient, scale = dense.gradients[name], ALPHA / RANK
        name_a, name_b = name_factors(name.removesuffix(".weight"))
        gradients[name_a] = scale * b.to(gradient).T @ gradient
        gradients[name_b] = scale * gradient @ a.to(gradient).T
    return Computed(dense.log_probs, gradients)


def identify_alone(folder: Path, weights: dict[str, torch.Tensor]) -> str:
    """Compute the fingerprint of the adapters that compute without a scale, on the weights in the folder."""
    factors = {}
    for name, (a, b) in list_factors(weights).items():
        name_a, name_b = name_factors(name.removesuffix(".weight"))
        factors |= {name_a: a, name_b: ALPHA / RANK * b}
    specs = [TensorSpec(name, tuple(factor.shape), "float32") for name, factor in factors.items()]
    digests = {name: digest(factor).tolist() for name, factor in factors.items()}
    base = read_fingerprint(folder, Mapping(read_architecture(folder)))
    return compute_fingerprint(specs, digests, base)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("qwen3", marks=pytest.mark.each_change),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_a_dense_model_restricted_to_the_factors(tmp_path: Path, model: str) -> None:
    check(tmp_path / model, model, CASES[model])


@pytest.mark.parametrize(
    "model",
    [pytest.param("qwen3_moe", marks=pytest.mark.each_change), pytest.param("qwen3", marks=pytest.mark.slow)],
)
def test_gradients_with_layers_of_transformer_engine_are_those_of_a_dense_model_too(tmp_path: Path, model: str) -> None:
    check(tmp_path / model, model, WITH_ENGINE[model], WITH_TRANSFORMER_ENGINE)


def check(folder: Path, model: str, cases: dict[str, str], platform: str = "cpu") -> None:
    """Compare gradients, the norm and both forms of what is published in each layout."""
    draw_base(model, folder)
    weights = hf_models.split_stacks(load_file(folder / "model.safetensors"))
    dense = expected_at(merge(weights), folder)
    expected = Expected(*(restrict(one, weights) for one in (dense.theirs, dense.truth)))
    ranks: list[dict[str, Any]] = run_ranks(compute, 2, folder, cases, platform=platform)
    for name, found in ranks[0].items():
        worst = expected.worst(found.computed)
        print(model, name, worst)
        assert all(error <= 1 for error, _ in worst.values()), name
        norm = torch.cat([gradient.flatten() for gradient in found.computed.gradients.values()]).norm()
        assert found.norm == pytest.approx(norm.item(), rel=1e-4), name
    assert len({found.merged for found in ranks[0].values()}) == 1
    assert {found.alone for found in ranks[0].values()} == {identify_alone(folder, weights)}


@pytest.mark.slow
def test_gradients_in_bfloat16_are_as_near_as_those_of_a_dense_model(tmp_path: Path) -> None:
    """Compare with transformers in the same precision, whose weights are merged and rounded."""
    folder = draw_base("qwen3", tmp_path / "qwen3")
    weights = load_file(folder / "model.safetensors")
    dense = expected_at(merge(weights), folder, theirs=torch.bfloat16)
    expected = Expected(*(restrict(one, weights) for one in (dense.theirs, dense.truth)))
    cases = {name: f"{LAYOUTS[name]} --bf16" for name in ("TP2+SP", "DP2+overlap")}
    for name, found in run_ranks(compute, 2, folder, cases)[0].items():
        worst = expected.worst(found.computed)
        print(name, worst)
        assert all(error <= 1 for error, _ in worst.values()), name
        assert 0 < found.norm < float("inf")
