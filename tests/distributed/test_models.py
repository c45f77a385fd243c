"""The model in every layout: log-probs and gradients are transformers'."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt import BACKENDS
from tests import hf_models
from tests.distributed import parity
from tests.distributed.layouts import CASES, list_layouts
from tests.ranks import run_ranks

WORLD_SIZES = [1, 2, pytest.param(4, marks=pytest.mark.each_change)]

MODELS = [
    pytest.param(name, marks=pytest.mark.slow) if name in hf_models.COMPARED_LESS_OFTEN else name
    for name in hf_models.CONFIGS
]

Computed = dict[tuple[str, str], tuple[parity.Computed, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: hf_models.draw(name, root / name) for name in hf_models.CONFIGS}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Callable[[str, float], parity.Expected]:
    return functools.cache(lambda name, temperature: parity.expected(folders[name], temperature=temperature))


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path]) -> Callable[..., Computed]:
    """Compute results by layout and model, in all layouts of a number of ranks."""

    @functools.cache
    def of(world_size: int, is_less_often: bool) -> Computed:
        results: Computed = {}
        chosen = [name for name in folders if (name in hf_models.COMPARED_LESS_OFTEN) is is_less_often]
        for names in {list_layouts(name): None for name in chosen}:
            models = {name: folders[name] for name in chosen if list_layouts(name) == names}
            cases = [name for name in names if CASES[name].world_size == world_size]
            results |= run_ranks(parity.run_layouts, world_size, cases, models)[0]
        return results

    return of


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_log_probs_and_gradients_equal_those_of_transformers_in_every_layout(name, world_size, computed, expected):
    of_transformers = expected(name, parity.TEMPERATURE)
    for tensor, gradient in of_transformers.truth.gradients.items():
        assert gradient.any(), f"no gradient reaches {tensor}"
    is_less_often = name in hf_models.COMPARED_LESS_OFTEN
    found = {layout: one for (layout, of), one in computed(world_size, is_less_often).items() if of == name}
    assert len({fingerprint for _, fingerprint in found.values()}) == 1
    ours = {layout: results for layout, (results, _) in found.items()}
    assert ours.keys() == {layout for layout in list_layouts(name) if CASES[layout].world_size == world_size}
    for layout, results in ours.items():
        worst = of_transformers.worst(results)
        print(f"{layout:>18} {name:<14} error / bound: {worst}")
        assert all(error <= 1 for error, _ in worst.values())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_fingerprint_is_the_same_from_every_layout(world_size, computed) -> None:
    by_model: dict[str, set[str]] = {}
    for (_, name), (_, fingerprint) in (computed(1, False) | computed(world_size, False)).items():
        by_model.setdefault(name, set()).add(fingerprint)
    assert all(len(fingerprints) == 1 for fingerprints in by_model.values())
    # Two of the models have the same weights and differ in how they use them.
    assert len(set.union(*by_model.values())) == len(by_model) - 1


@pytest.mark.each_change
def test_shared_packs_and_separate_sequences_give_the_results_of_transformers(folders, expected) -> None:
    # Merging knows no sliding window, which mistral has.
    here = [name for name, one in BACKENDS.items() if one.refusal(Conditions("cpu", torch.float32)) is None]
    of_two = ["TP2", "TP2+SP", "PP2", "CP2"]
    of_four = ["TP2xCP2", "CP2xPP2", "CP4"]
    for name, world_size, layouts, backends in (
        ("qwen3", 2, of_two, here),
        ("mistral", 2, of_two, ["gather", "naive"]),
        ("qwen3", 4, of_four, ["merge"]),
    ):
        for (case_name, backend), computed in run_ranks(
            parity.run_shared_and_separate, world_size, layouts, folders[name], backends
        )[0].items():
            for packing, ours in computed.items():
                worst = expected(name, 1.0).worst(ours)
                print(f"{case_name:>8} {name:<8} {backend:<8} {packing:<8} error / bound: {worst}")
                assert all(error <= 1 for error, _ in worst.values())
