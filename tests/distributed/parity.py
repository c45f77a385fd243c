"""Ragged groups, the same on every machine, and what each layout makes of them."""

from pathlib import Path

import torch

from megatron_rl.data.packing import Pack, pack_groups, pack_sequences
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, session_of

TEMPERATURE = 0.7
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


def run_shared_and_separate(
    case_names: list[str], folder: Path, backends: list[str]
) -> dict[tuple[str, str], tuple[list, list, dict, dict]]:
    """On each rank: the same responses, behind shared prompts and each behind a copy of its own; these by naive."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for case_name in case_names:
        case = CASES[case_name]
        with session_of(case) as session:
            model = build(session, case, folder)
            separate = of_responses(model.forward_backward(separate_packs(divisor(case.sizes)), separate_loss))
            separate_gradients = model.gradients()
            for backend in backends:
                model = build(session, case, folder, attention_backend=backend)
                shared = model.forward_backward(shared_packs(divisor(case.sizes)), shared_loss)
                results[case_name, backend] = (shared, separate, model.gradients(), separate_gradients)
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
                packs = shared_packs(divisor(case.sizes))
                log_probs = model.forward(packs, TEMPERATURE)
                model.forward_backward(packs, shared_loss)
                results[case_name, name] = (log_probs, model.gradients(), model.weights.fingerprint())
    return results
