"""The model in every layout: log-probs are transformers', gradients are the same everywhere."""

from pathlib import Path

import pytest
import torch

from megatron_rl.ops.shared_prompt import BACKENDS, Conditions
from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES, DENSE_LAYOUTS, EXPERT_LAYOUTS
from tests.ranks import run_ranks

LOG_PROB_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in hf_models.CONFIGS}


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path]) -> dict[tuple[str, str], tuple[list, dict, str]]:
    experts = {name: folder for name, folder in folders.items() if name in hf_models.WITH_EXPERTS}
    dense = {name: folder for name, folder in folders.items() if name not in hf_models.WITH_EXPERTS}
    results = {}
    for world_size in (1, 2, 4):
        for names, models in ((DENSE_LAYOUTS, dense), (EXPERT_LAYOUTS, experts)):
            cases = [name for name in names if CASES[name].world_size == world_size]
            results |= run_ranks(parity.run_layouts, world_size, cases, models, timeout=240)[0]
    return results


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    """transformers' log-probs of the responses, pack by pack."""
    results = {}
    for name, folder in folders.items():
        whole = [
            torch.cat(hf_models.log_probs(folder, [p + r for p, rs in groups for r in rs], parity.TEMPERATURE))
            for groups in parity.micro_batches()
        ]
        results[name] = parity.of_responses(whole)
    return results


def test_log_probs_are_those_of_transformers_in_every_layout(computed, expected) -> None:
    differences = {
        (layout, name): max(
            (ours - theirs).abs().max().item() for ours, theirs in zip(log_probs, expected[name], strict=True)
        )
        for (layout, name), (log_probs, _, _) in computed.items()
    }
    for key, difference in differences.items():
        print(f"{key[0]:>18} {key[1]:<14} {difference:.2e}")
    assert len(differences) == 5 * len(DENSE_LAYOUTS) + 3 * len(EXPERT_LAYOUTS)
    assert max(differences.values()) <= LOG_PROB_TOLERANCE


def test_gradients_are_the_same_in_every_layout_and_none_is_zero(computed) -> None:
    worst = {}
    for (layout, name), (_, gradients, _) in computed.items():
        reference = computed["TP1", name][1]
        assert gradients.keys() == reference.keys()
        for tensor, gradient in gradients.items():
            largest = reference[tensor].abs().max()
            assert largest > 0, f"{name}: no gradient reaches {tensor}"
            difference = ((gradient - reference[tensor]).abs().max() / largest).item()
            worst[layout, name] = max(worst.get((layout, name), (0.0, "")), (difference, tensor))
    for key, (difference, tensor) in worst.items():
        print(f"{key[0]:>18} {key[1]:<14} {difference:.2e} {tensor}")
    assert max(difference for difference, _ in worst.values()) <= GRADIENT_TOLERANCE


def test_the_fingerprint_is_the_same_from_every_layout(computed) -> None:
    by_model: dict[str, set[str]] = {}
    for (_, name), (_, _, fingerprint) in computed.items():
        by_model.setdefault(name, set()).add(fingerprint)
    assert all(len(fingerprints) == 1 for fingerprints in by_model.values())
    # Two of the models have the same weights and differ in how they use them.
    assert len(set.union(*by_model.values())) == len(by_model) - 1


def test_a_shared_pack_equals_separate_sequences(folders) -> None:
    # Merging knows no sliding window, which mistral has.
    here = [name for name, one in BACKENDS.items() if one.refusal(Conditions("cpu", torch.float32)) is None]
    of_two = ["TP2", "TP2+SP", "PP2", "CP2"]
    of_four = ["TP2xCP2", "CP2xPP2", "CP4"]
    for name, world_size, layouts, backends in (
        ("qwen3", 2, of_two, here),
        ("mistral", 2, of_two, ["gather", "naive"]),
        ("qwen3", 4, of_four, ["merge"]),
    ):
        for (case_name, backend), (shared, separate, gradients, separate_gradients) in run_ranks(
            parity.run_shared_and_separate, world_size, layouts, folders[name], backends
        )[0].items():
            log_probs = max((a - b).abs().max().item() for a, b in zip(shared, separate, strict=True))
            worst = max(
                ((gradients[key] - value).abs().max() / value.abs().max()).item()
                for key, value in separate_gradients.items()
            )
            print(f"{case_name:>8} {name:<8} {backend:<8} log-probs {log_probs:.2e} gradients {worst:.2e}")
            assert log_probs <= LOG_PROB_TOLERANCE
            assert worst <= GRADIENT_TOLERANCE
