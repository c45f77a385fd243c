"""Ragged groups, the same on every machine, and the results of each layout for them."""

import dataclasses
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.trainer.data.packing import Pack, pack_groups, pack_sequences
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.truth import error_over_bound, everything_in, worst_of

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


@dataclasses.dataclass(frozen=True)
class Computed:
    """Log-probs of the responses, pack by pack, and the gradients of the sum of their `shared_loss`."""

    log_probs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results of transformers in the run's precision and in float64."""

    theirs: Computed
    truth: Computed

    def worst(self, ours: Computed) -> dict[str, tuple[float, str]]:
        """Find the largest error over its bound, of the log-probs and of a gradient, and its place."""
        packs = [torch.cat(one.log_probs) for one in (ours, self.theirs, self.truth)]
        return {"log-probs": (error_over_bound(*packs), ""), "gradients": self.worst_gradient(ours.gradients)}

    def worst_gradient(self, ours: dict[str, torch.Tensor]) -> tuple[float, str]:
        return worst_of(ours, self.theirs.gradients, self.truth.gradients)


def expected(
    folder: Path,
    batches: list[Groups] | None = None,
    temperature: float = 1.0,
    theirs: torch.dtype = torch.float32,
) -> Expected:
    """Compute the expected results of the responses, each after a copy of its prompt, without packing."""
    batches = micro_batches() if batches is None else batches
    return Expected(*(_with_gradients(folder, batches, temperature, dtype) for dtype in (theirs, torch.float64)))


def expected_at(
    weights: dict[str, torch.Tensor],
    like: Path,
    batches: list[Groups] | None = None,
    temperature: float = 1.0,
    theirs: torch.dtype = torch.float32,
) -> Expected:
    """Compute the same with other weights in place of the folder's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(like / "config.json", folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return expected(folder, batches, temperature, theirs)


def by_transformers(
    folder: Path, dtype: torch.dtype, batches: list[Groups] | None = None, temperature: float = 1.0
) -> list[torch.Tensor]:
    """Compute the log-probs of the responses, pack by pack."""
    with torch.no_grad(), everything_in(dtype):
        model = hf_models.load(folder, dtype)
        return [_of_responses(model, groups, temperature) for groups in batches or micro_batches()]


def _with_gradients(folder: Path, batches: list[Groups], temperature: float, dtype: torch.dtype) -> Computed:
    with everything_in(dtype):
        model = hf_models.load(folder, dtype)
        log_probs = [_of_responses(model, groups, temperature) for groups in batches]
    # Outside, where tokens have the weights that our loss gives them.
    sum(shared_loss(log_probs_N) for log_probs_N in log_probs).backward()
    return Computed([log_probs_N.detach() for log_probs_N in log_probs], hf_models.gradients_of(model))


def _of_responses(model: torch.nn.Module, groups: Groups, temperature: float) -> torch.Tensor:
    pairs = [(prompt, response) for prompt, responses in groups for response in responses]
    if not pairs:
        return torch.zeros(0, dtype=model.dtype)
    found = hf_models.decode_log_probs(model, [prompt + response for prompt, response in pairs], temperature)
    return torch.cat([values[len(prompt) - 1 :] for values, (prompt, _) in zip(found, pairs, strict=True)])


def of_responses(log_probs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Select the log-probs of responses from those of whole sequences, in the order of a shared pack."""
    results = []
    for groups, values in zip(micro_batches(), log_probs, strict=True):
        lengths = [(len(prompt), len(response)) for prompt, responses in groups for response in responses]
        parts = values.split([prompt + response - 1 for prompt, response in lengths])
        results.append(torch.cat([part[prompt - 1 :] for part, (prompt, _) in zip(parts, lengths, strict=True)]))
    return results


def weights_of_tokens(num_targets: int) -> torch.Tensor:
    """Return weights that are uneven and of both signs, as advantages are."""
    return torch.sin(torch.arange(num_targets, dtype=torch.float32) * 1.7 + 0.3)


def shared_loss(log_probs_N: torch.Tensor, _: Pack | None = None) -> torch.Tensor:
    return (log_probs_N * weights_of_tokens(len(log_probs_N)).to(log_probs_N.device)).sum()


def separate_loss(log_probs_N: torch.Tensor, pack: Pack) -> torch.Tensor:
    """Compute the same loss of the responses' tokens. The prompts' tokens are targets here too, and do not count."""
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
) -> dict[tuple[str, str], dict[str, Computed]]:
    """Compute the same responses on each rank: after shared prompts, and by naive each after a copy of its own."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for case_name in case_names:
        case = CASES[case_name]
        with start_session(case) as session:
            model = build(session, case, folder)
            whole = model.forward_backward(separate_packs(divisor(case.sizes)), separate_loss)
            separate = Computed(of_responses(whole), model.gradients())
            for backend in backends:
                model = build(session, case, folder, attention_backend=backend)
                log_probs = model.forward_backward(shared_packs(divisor(case.sizes)), shared_loss)
                shared = Computed(log_probs, model.gradients())
                results[case_name, backend] = {"shared": shared, "separate": separate}
    return results


def run_layouts(case_names: list[str], folders: dict[str, Path]) -> dict[tuple[str, str], tuple[Computed, str]]:
    """Compute every model on each rank, in every layout for the number of ranks, and the weights' fingerprints."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for case_name in case_names:
        case = CASES[case_name]
        with start_session(case) as session:
            for name, folder in folders.items():
                model = build(session, case, folder)
                packs = shared_packs(divisor(case.sizes))
                log_probs = model.forward(packs, TEMPERATURE)
                with_gradients = model.forward_backward(packs, shared_loss, TEMPERATURE)
                assert all(map(torch.equal, with_gradients, log_probs))
                results[case_name, name] = (Computed(log_probs, model.gradients()), model.weights.fingerprint())
    return results
