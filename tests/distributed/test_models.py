"""The model in every layout: log-probs are transformers', gradients are the same everywhere."""

from pathlib import Path

import pytest
import torch

from megatron_rl.data.packing import Pack, pack_groups, pack_sequences
from tests import hf_models
from tests.distributed.layouts import CASES, DENSE_LAYOUTS, EXPERT_LAYOUTS, build, session_of
from tests.ranks import run_ranks

TEMPERATURE = 0.7
LOG_PROB_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-5
# Prompt lengths with their responses' lengths, a list of groups for each micro-batch: ragged, past the scaled rope's
# original length of 32, with one response, with a response of one token.
SHAPES = (
    [(40, (20, 1, 33)), (3, (5, 9)), (17, (30,))],
    [(1, (2, 70)), (12, (12, 12, 12)), (50, (8,))],
    [(25, (25, 3)), (6, (41,)), (9, (1, 1, 10))],
    [(33, (14, 27)), (2, (60, 4)), (21, (6, 7))],
)

Groups = list[tuple[list[int], list[list[int]]]]


def micro_batches() -> list[Groups]:
    tokens = iter(hf_models.sequences([sum(r) + p for batch in SHAPES for p, r in batch]))
    batches: list[Groups] = []
    for shape in SHAPES:
        groups: Groups = []
        for prompt_length, response_lengths in shape:
            flat = next(tokens)
            prompt, rest = flat[:prompt_length], flat[prompt_length:]
            responses = []
            for length in response_lengths:
                responses.append(rest[:length])
                rest = rest[length:]
            groups.append((prompt, responses))
        batches.append(groups)
    return batches


def shared_packs(multiple_of: int) -> list[Pack]:
    return [pack_groups(groups, multiple_of) for groups in micro_batches()]


def separate_packs(multiple_of: int) -> list[Pack]:
    return [
        pack_sequences([prompt + response for prompt, responses in groups for response in responses], multiple_of)
        for groups in micro_batches()
    ]


def of_responses(log_probs: list[torch.Tensor]) -> list[torch.Tensor]:
    """From log-probs of whole sequences to those of their responses, as a shared pack has them."""
    results = []
    for groups, values in zip(micro_batches(), log_probs, strict=True):
        lengths = [(len(prompt), len(response)) for prompt, responses in groups for response in responses]
        parts = values.split([prompt + response - 1 for prompt, response in lengths])
        results.append(torch.cat([part[prompt - 1 :] for part, (prompt, _) in zip(parts, lengths, strict=True)]))
    return results


def weights_of_tokens(num_targets: int) -> torch.Tensor:
    """Uneven and of both signs, as advantages are."""
    return torch.sin(torch.arange(num_targets, dtype=torch.float32) * 1.7 + 0.3)


def shared_loss(log_probs_N: torch.Tensor, _: Pack) -> torch.Tensor:
    return (log_probs_N * weights_of_tokens(len(log_probs_N))).sum()


def separate_loss(log_probs_N: torch.Tensor, pack: Pack) -> torch.Tensor:
    """The same loss of the responses' tokens; the prompts' tokens are targets here too and count for nothing."""
    lengths = [
        [(len(prompt), len(response)) for prompt, responses in groups for response in responses]
        for groups in micro_batches()
    ]
    mine = next(pairs for pairs in lengths if sum(p + r - 1 for p, r in pairs) == len(log_probs_N))
    parts = log_probs_N.split([prompt + response - 1 for prompt, response in mine])
    chosen_N = torch.cat([part[prompt - 1 :] for part, (prompt, _) in zip(parts, mine, strict=True)])
    return (chosen_N * weights_of_tokens(len(chosen_N))).sum()


def run_shared_and_separate(case_names: list[str], folder: Path) -> dict[str, tuple[list, list, dict, dict]]:
    """On each rank: the same responses, behind shared prompts and each behind a copy of its own."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for case_name in case_names:
        case = CASES[case_name]
        with session_of(case) as session:
            model = build(session, case, folder)
            shared = model.forward_backward(shared_packs(case.sizes.tensor), shared_loss)
            shared_gradients = model.gradients()
            separate = model.forward_backward(separate_packs(case.sizes.tensor), separate_loss)
            results[case_name] = (shared, of_responses(separate), shared_gradients, model.gradients())
    return results


def run_layouts(case_names: list[str], folders: dict[str, Path]) -> dict[tuple[str, str], tuple[list, dict, str]]:
    """On each rank: every model in every layout of the same number of ranks."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for case_name in case_names:
        case = CASES[case_name]
        with session_of(case) as session:
            for name, folder in folders.items():
                model = build(session, case, folder)
                packs = shared_packs(case.sizes.tensor)
                log_probs = model.forward(packs, TEMPERATURE)
                model.forward_backward(packs, shared_loss)
                results[case_name, name] = (log_probs, model.gradients(), model.weights.fingerprint())
    return results


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
            results |= run_ranks(run_layouts, world_size, cases, models, timeout=240)[0]
    return results


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[torch.Tensor]]:
    """transformers' log-probs of the responses, pack by pack."""
    results = {}
    for name, folder in folders.items():
        whole = [
            torch.cat(hf_models.log_probs(folder, [p + r for p, rs in groups for r in rs], TEMPERATURE))
            for groups in micro_batches()
        ]
        results[name] = of_responses(whole)
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
    for name in ("qwen3", "mistral"):
        for case_name, (shared, separate, gradients, separate_gradients) in run_ranks(
            run_shared_and_separate, 2, ["TP2", "TP2+SP", "PP2"], folders[name]
        )[0].items():
            log_probs = max((a - b).abs().max().item() for a, b in zip(shared, separate, strict=True))
            worst = max(
                ((gradients[key] - value).abs().max() / value.abs().max()).item()
                for key, value in separate_gradients.items()
            )
            print(f"{case_name:>8} {name:<8} log-probs {log_probs:.2e} gradients {worst:.2e}")
            assert log_probs <= LOG_PROB_TOLERANCE
            assert worst <= GRADIENT_TOLERANCE
