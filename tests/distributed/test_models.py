"""The model in every layout: log-probs and gradients are transformers'."""

from pathlib import Path

import pytest
import torch

from megatron_rl.ops.shared_prompt import BACKENDS, Conditions
from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES, DENSE_LAYOUTS, EXPERT_LAYOUTS
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in hf_models.CONFIGS}


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path]) -> dict[tuple[str, str], tuple[parity.Computed, str]]:
    experts = {name: folder for name, folder in folders.items() if name in hf_models.WITH_EXPERTS}
    dense = {name: folder for name, folder in folders.items() if name not in hf_models.WITH_EXPERTS}
    results = {}
    for world_size in (1, 2, 4):
        for names, models in ((DENSE_LAYOUTS, dense), (EXPERT_LAYOUTS, experts)):
            cases = [name for name in names if CASES[name].world_size == world_size]
            results |= run_ranks(parity.run_layouts, world_size, cases, models, timeout=240)[0]
    assert len(results) == 5 * len(DENSE_LAYOUTS) + 3 * len(EXPERT_LAYOUTS)
    return results


@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_log_probs_and_gradients_are_those_of_transformers_in_every_layout(name, folders, computed) -> None:
    expected = parity.expected(folders[name], temperature=parity.TEMPERATURE)
    for tensor, gradient in expected.truth.gradients.items():
        assert gradient.any(), f"no gradient reaches {tensor}"
    found = {layout: expected.worst(ours) for (layout, of), (ours, _) in computed.items() if of == name}
    for layout, worst in found.items():
        print(f"{layout:>18} {name:<14} error / bound: {worst}")
    assert len(found) == len(EXPERT_LAYOUTS if name in hf_models.WITH_EXPERTS else DENSE_LAYOUTS)
    assert all(error <= 1 for worst in found.values() for error, _ in worst.values())


def test_the_fingerprint_is_the_same_from_every_layout(computed) -> None:
    by_model: dict[str, set[str]] = {}
    for (_, name), (_, fingerprint) in computed.items():
        by_model.setdefault(name, set()).add(fingerprint)
    assert all(len(fingerprints) == 1 for fingerprints in by_model.values())
    # Two of the models have the same weights and differ in how they use them.
    assert len(set.union(*by_model.values())) == len(by_model) - 1


def test_a_shared_pack_and_separate_sequences_are_those_of_transformers(folders) -> None:
    # Merging knows no sliding window, which mistral has.
    here = [name for name, one in BACKENDS.items() if one.refusal(Conditions("cpu", torch.float32)) is None]
    of_two = ["TP2", "TP2+SP", "PP2", "CP2"]
    of_four = ["TP2xCP2", "CP2xPP2", "CP4"]
    expected = {name: parity.expected(folders[name]) for name in ("qwen3", "mistral")}
    for name, world_size, layouts, backends in (
        ("qwen3", 2, of_two, here),
        ("mistral", 2, of_two, ["gather", "naive"]),
        ("qwen3", 4, of_four, ["merge"]),
    ):
        for (case_name, backend), computed in run_ranks(
            parity.run_shared_and_separate, world_size, layouts, folders[name], backends
        )[0].items():
            for packing, ours in computed.items():
                worst = expected[name].worst(ours)
                print(f"{case_name:>8} {name:<8} {backend:<8} {packing:<8} error / bound: {worst}")
                assert all(error <= 1 for error, _ in worst.values())
