"""The bias that helps to choose experts: in float32 and untouched, in a model of half precision too."""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.trainer.mcore.model.frozen import copy_weights, freeze
from megatron_rl.trainer.mcore.model.router import BiasedRouter
from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change

_BIAS = "e_score_correction_bias"
BIAS = f"model.layers.1.mlp.gate.{_BIAS}"
RATE = 0.125
_RECOMPUTED = ("recompute_granularity", "recompute_method", "recompute_num_layers")


def test_the_bias_of_a_model_in_bfloat16_is_stored_published_and_saved_in_float32(tmp_path: Path) -> None:
    folder = hf_models.draw("glm4_moe", tmp_path / "model")
    given = load_file(folder / "model.safetensors")[BIAS]
    # Rounding would show.
    assert not torch.equal(given.bfloat16().float(), given)
    with start_session(CASES["TP1"]) as session:
        model, other = (build(session, CASES["TP1"], folder, bf16=True, params_dtype=torch.bfloat16) for _ in range(2))
        routers = [module for module in model.chunks[0].modules() if isinstance(module, BiasedRouter)]
        assert len(routers) == 3
        bias = routers[0].expert_bias
        model.forward_backward(parity.shared_packs(1), parity.shared_loss)
        assert not bias.requires_grad
        assert torch.equal(bias, given)
        fingerprint = model.weights.save_hf(tmp_path / "saved", dtype="bfloat16")
        assert fingerprint == model.weights.fingerprint("bfloat16")
        streamed = {name: tensor for bucket in model.weights.stream("bfloat16") for name, tensor in bucket}
        state = model.chunks[0].sharded_state_dict()
        assert state["decoder.layers.1.mlp.router.expert_bias"].data is bias
        with torch.no_grad():
            bias.add_(1)
        assert model.weights.fingerprint("bfloat16") != fingerprint
        freeze(other.chunks)
        copy_weights(model.chunks, other.chunks)
        assert torch.equal(dict(other.chunks[0].named_parameters())["decoder.layers.1.mlp.router.expert_bias"], bias)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    specs = {spec.name: spec.dtype for spec in Mapping(model.architecture).manifest("bfloat16")}
    assert {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in saved.items()} == specs
    assert saved[BIAS].dtype == torch.float32
    assert torch.equal(saved[BIAS], given)
    assert streamed.keys() == saved.keys()
    assert all(streamed[name].dtype == tensor.dtype and streamed[name].equal(tensor) for name, tensor in saved.items())


Update = dict[str, tuple[torch.Tensor, torch.Tensor]]


def update_once(names: list[str], folder: Path) -> dict[str, Update]:
    """Run one update's passes in each layout; return the counts of tokens and the biases that they leave."""
    torch.distributed.init_process_group("gloo")
    results = {}
    counted: list[torch.Tensor] = []
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    update = module.get_updated_expert_bias

    def record(counts_LX: torch.Tensor, *arguments: Any) -> torch.Tensor:
        result = update(counts_LX, *arguments)
        counted[:] = [*counts_LX]
        return result

    module.get_updated_expert_bias = record
    for name in names:
        layout, _, recomputed = name.partition(" ")
        with start_session(CASES[layout]) as session:
            again = dict(zip(_RECOMPUTED, ("full", "uniform", 1), strict=True)) if recomputed else {}
            model = build(session, CASES[layout], folder, moe_router_bias_update_rate=RATE, **again)
            packs = parity.shared_packs(divisor(CASES[layout].sizes) * 3)
            model.forward(packs)
            model.forward_backward(packs, parity.shared_loss)
            routers = [
                module for chunk in model.chunks for module in chunk.modules() if isinstance(module, BiasedRouter)
            ]
            assert not any(router.local_tokens_per_expert.any() for router in routers)
            results[name] = {
                f"model.layers.{router.layer_number - 1}.mlp.gate.{_BIAS}": (counts_X, router.expert_bias.detach())
                for router, counts_X in zip(routers, counted, strict=True)
            }
    return results


def update_by_transformers(folder: Path) -> Update:
    """Compute the same from the experts that transformers chooses, each token of a shared prompt counted once."""
    model = hf_models.load(folder)
    counts: dict[str, torch.Tensor] = {}
    num_known = 0

    def count(name: str, chosen_RK: torch.Tensor) -> None:
        counts[name] = counts.get(name, 0) + torch.bincount(chosen_RK[num_known:].flatten(), minlength=8)

    biases = {name: bias for name, bias in model.named_buffers() if name.endswith(_BIAS)}
    for name in biases:
        gate = model.get_submodule(name.removesuffix(f".{_BIAS}"))
        gate.register_forward_hook(lambda _, __, output, name=name: count(name, output[2]))
    with torch.no_grad():
        for groups in parity.micro_batches():
            for prompt, responses in groups:
                for number, response in enumerate(responses):
                    num_known = len(prompt) if number else 0
                    model(torch.tensor([[*prompt, *response]]))
    for counts_X in counts.values():
        assert counts_X.sum() == 2 * sum(p + sum(r) for batch in parity.SHAPES for p, r in batch)
    moved = {name: torch.sign(counts_X.float().mean() - counts_X) for name, counts_X in counts.items()}
    return {name: (counts[name], bias + RATE * moved[name]) for name, bias in biases.items()}


def test_an_update_moves_the_bias_towards_experts_with_fewer_tokens_in_every_layout(tmp_path: Path) -> None:
    folder = hf_models.draw("glm4_moe", tmp_path / "model")
    expected = update_by_transformers(folder)
    names = ["DP2+distopt", "TP2+SP,EP2,ETP1", "EP2xCP2", "PP2 recomputed"]
    ranks = run_ranks(update_once, 2, names, folder)
    for name in names:
        assert set().union(*(results[name] for results in ranks)) == expected.keys()
        for tensor, (counts_X, bias_X) in (item for results in ranks for item in results[name].items()):
            expected_counts_X, expected_X = expected[tensor]
            assert counts_X.tolist() == expected_counts_X.tolist(), (name, tensor)
            assert torch.equal(bias_X, expected_X), (name, tensor)


def test_layers_that_predict_several_tokens_are_named_and_copied_as_they_are(tmp_path: Path, caplog) -> None:
    folder = hf_models.draw("glm4_moe", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    # Large enough for each of the two ways to write.
    extra = {
        "model.layers.4.enorm.weight": torch.randn(3),
        "model.layers.4.mlp.gate.weight": torch.randn(200, 100),
        "model.layers.4.eh_proj.weight": torch.randn(4, 8).bfloat16(),
    }
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    with start_session(CASES["TP1"]) as session:
        model = build(session, CASES["TP1"], folder)
        fingerprint = model.weights.fingerprint()
        assert model.weights.save_hf(tmp_path / "saved", source=folder) == fingerprint
        shutil.copytree(folder, tmp_path / "without", ignore=shutil.ignore_patterns("*.safetensors"))
        assert model.weights.save_hf(tmp_path / "cut", source=tmp_path / "without") == fingerprint
    (said,) = [record.getMessage() for record in caplog.records if "exports copy them" in record.getMessage()]
    assert said.startswith("3 tensors of layers that predict several tokens, such as model.layers.4.eh_proj.weight")
    assert any("are not exported: " in record.getMessage() for record in caplog.records)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == tensors.keys() | extra.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in extra.items())
    assert {name: tensor.dtype for name, tensor in saved.items() if name in extra} == {
        name: tensor.dtype for name, tensor in extra.items()
    }
    assert load_file(tmp_path / "cut" / "model.safetensors").keys() == tensors.keys()
    # A run may start from an export.
    with start_session(CASES["TP1"]) as session:
        assert build(session, CASES["TP1"], tmp_path / "saved").weights.fingerprint() == fingerprint
