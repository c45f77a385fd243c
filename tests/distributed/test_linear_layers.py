"""Linear layers whose prompts' states begin responses: against transformers, with faults planted, and recomputed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.attention import Attention
from safetensors.torch import load_file, save_file

from megatron_rl.ops.gated_delta import chunks, convolution
from megatron_rl.ops.shared_prompt.layout import ROOT
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.trainer.data.packing import pack_groups
from megatron_rl.trainer.mcore.model import gated_delta_net
from megatron_rl.trainer.mcore.model.gated_delta_net import GatedDeltaNet
from megatron_rl.trainer.mcore.model.gpt import padded_vocab_size
from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES, build, list_layouts, start_session
from tests.distributed.test_footprint import count
from tests.ranks import run_ranks

LEAST_EFFECT = 1e-2
# A prompt of more than a chunk, and responses from one token to more than a chunk.
GROUPS: list[parity.Groups] = [
    [(prompt[:length], [prompt[length:][:one] for one in responses])]
    for (length, responses), prompt in zip(
        (((70, (9, 66, 1)), (5, (12,)))), hf_models.sequences([140, 20]), strict=True
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw a model with a linear layer and one of full attention."""
    types = ["linear_attention", "full_attention"]
    return hf_models.draw("qwen3_5", tmp_path_factory.mktemp("model"), num_hidden_layers=2, layer_types=types)


@pytest.fixture(scope="module")
def expected(folder: Path) -> parity.Expected:
    return parity.expected(folder, GROUPS)


def compute(folder: Path, **changes: Any) -> parity.Computed:
    with start_session(CASES["TP1"]) as session:
        model = build(session, CASES["TP1"], folder, **changes)
        packs = [pack_groups(groups) for groups in GROUPS]
        return parity.Computed(model.forward_backward(packs, parity.shared_loss), model.gradients())


def test_a_shared_prompt_has_the_log_probs_and_gradients_of_transformers(folder, expected) -> None:
    worst = expected.worst(compute(folder))
    print(worst)
    assert all(error <= 1 for error, _ in worst.values())


def test_recomputed_linear_layers_give_the_same_bits(folder) -> None:
    plain = compute(folder)
    calls = mock.Mock(wraps=gated_delta_net.gated_delta_rule)
    with mock.patch.object(gated_delta_net, "gated_delta_rule", calls):
        again = compute(folder, recompute_granularity="selective", recompute_modules=["core_attn"])
    assert calls.call_count == 2 * len(GROUPS)
    assert all(map(torch.equal, again.log_probs, plain.log_probs))
    assert again.gradients.keys() == plain.gradients.keys()
    assert all(torch.equal(again.gradients[name], plain.gradients[name]) for name in plain.gradients)


@pytest.mark.each_change
def test_several_kinds_of_ranks_agree_with_transformers(tmp_path: Path) -> None:
    name = "qwen3_5"
    folder = hf_models.draw(name, tmp_path / name)
    of_transformers = parity.expected(folder, temperature=parity.TEMPERATURE)
    cases = ["CP2xPP2", "TP2+SPxCP2"]
    assert set(cases) < set(list_layouts(name))
    for (case, _), (ours, _) in run_ranks(parity.run_layouts, 4, cases, {name: folder})[0].items():
        worst = of_transformers.worst(ours)
        print(f"{case:>12} error / bound: {worst}")
        assert all(error <= 1 for error, _ in worst.values())


@pytest.mark.slow
def test_gradients_of_vanishing_rows_are_as_large_as_those_of_transformers(tmp_path: Path) -> None:
    """Shrink convolutions: norms of queries, keys and outputs near zero multiply gradients by up to 1000 each."""
    norms = {}
    for factor in (1.0, 0.01, 0.001):
        folder = hf_models.draw("qwen3_5", tmp_path / f"{factor}")
        weights = load_file(folder / "model.safetensors")
        weights = {name: value * factor if "conv1d" in name else value for name, value in weights.items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        expected = parity.expected(folder, GROUPS)
        ours = compute(folder)
        worst = expected.worst(ours)
        norms[factor], true = (measure_norm(one.gradients) for one in (ours, expected.truth))
        print(f"convolutions x {factor:g}: {norms[factor]:.4g}, of transformers in float64 {true:.4g}; {worst}")
        assert all(error <= 1 for error, _ in worst.values())
        assert norms[factor] == pytest.approx(true, rel=1e-3)
    assert norms[0.001] > 50 * norms[1.0]


def measure_norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(sum(gradient.double().square().sum() for gradient in gradients.values()) ** 0.5)


def without_gate(self: GatedDeltaNet, out_RHV: torch.Tensor, gate_RHV: torch.Tensor) -> torch.Tensor:
    return plain_gate(self, out_RHV, torch.ones_like(gate_RHV))


plain_gate = GatedDeltaNet._gate
plain_decay = gated_delta_net.compute_log_decay
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "state not forked": (chunks, "find_filled_parent", lambda layout, segment: ROOT),
    "convolution's tail lost": (
        convolution, "_last_rows_above", lambda layout, segment, number: [layout.num_tokens] * number
    ),
    "decay of the other sign": (gated_delta_net, "compute_log_decay", lambda *given: -plain_decay(*given)),
    "no decay": (gated_delta_net, "compute_log_decay", lambda *given: 0 * plain_decay(*given)),
    "gate of linear layers left out": (GatedDeltaNet, "_gate", without_gate),
    "gate of attention left out": (Attention, "_apply_output_gate", lambda self, x, gate: x),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_linear_layers_changes_the_log_probs(
    fault: str, folder: Path, expected: parity.Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, change = FAULTS[fault]
    monkeypatch.setattr(where, name, change)
    with start_session(CASES["TP1"]) as session:
        found = build(session, CASES["TP1"], folder).forward([pack_groups(groups) for groups in GROUPS])
    effect = max((one - truth).abs().max().item() for one, truth in zip(found, expected.truth.log_probs, strict=True))
    print(f"{fault}: {effect:.3f}")
    # Written so that NaN counts as an effect.
    assert not effect < LEAST_EFFECT


@pytest.mark.each_change
def test_the_memory_of_linear_layers_is_counted(folder: Path) -> None:
    (counted,) = run_ranks(count, 1, folder, {"one": "--context-parallel-size 2"})
    (one,) = counted["one"]
    architecture = read_architecture(folder)
    padding = (padded_vocab_size(hf_models.VOCAB_SIZE, 1) - hf_models.VOCAB_SIZE) * architecture.hidden_size
    tensors = Mapping(architecture).manifest()
    assert one.num_parameters == sum(tensor.num_elements for tensor in tensors) + padding
    assert one.device["activations"] > 0
