"""Updates of --stage sft in every layout, against the same computed by transformers from padded sequences."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.trainer.data.demonstrations import Demonstration
from tests import hf_models
from tests.distributed.supervised_trials import DEMONSTRATIONS_PER_UPDATE, NUM_UPDATES, Seen, Trial, run_trials
from tests.distributed.training import CP2, LAYOUTS, OVERLAPPED
from tests.ranks import run_ranks
from tests.supervised_twin import Row, Tensors, Twin
from tests.truth import weighted_over_bound, worst_of

pytestmark = pytest.mark.each_change

NAMES = ("TP2", "TP2+SP", "PP2", "PP2xVPP2", "DP2", "DP2+overlap", "EP2")
FLAGS = {name: LAYOUTS[name] for name in NAMES} | {"CP2, overlapped": f"{CP2} {OVERLAPPED}"}


def draw_rows(count: int, seed: int, other_context: bool = False) -> list[Demonstration]:
    """Draw chats of one, two and three answers, some in two sequences; or the same with other tokens in what is given.

    Then only the last token before an answer stays the same: it predicts the answer's first.
    """
    draw, others = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    rows = []
    for number in range(count):
        sequences = []
        for _ in range(1 + number % 5 // 4):
            turns = []
            for turn in range(2 * (1 + number % 3)):
                tokens = draw.integers(0, hf_models.VOCAB_SIZE, int(draw.integers(1, 9))).astype(np.int32)
                if other_context and turn % 2 == 0:
                    tokens[:-1] = others.integers(0, hf_models.VOCAB_SIZE, len(tokens) - 1)
                turns.append(tokens)
            sequences.append(tuple(turns))
        rows.append(Demonstration(f"row {number}", tuple(sequences)))
    return rows


ROWS = draw_rows(DEMONSTRATIONS_PER_UPDATE * NUM_UPDATES, seed=3)
# Fewer than fill the micro-batches of two replicas, and an odd number.
HELD_OUT = draw_rows(5, seed=4)
OTHER_CONTEXT = draw_rows(len(ROWS), seed=3, other_context=True)


def plain(rows: Sequence[Demonstration]) -> list[Row]:
    return [[[turn.tolist() for turn in turns] for turns in row.sequences] for row in rows]


def other_answers(row: Demonstration) -> Demonstration:
    """Change the last token of the last answer."""
    *sequences, (*turns, last) = row.sequences
    return Demonstration(row.row, (*sequences, (*turns, (last + 1) % hf_models.VOCAB_SIZE)))


def draw_blind(folder: Path) -> Path:
    """Draw a model whose tokens see only themselves."""
    file = hf_models.draw("qwen3", folder) / "model.safetensors"
    weights = load_file(file)
    blind = {name: torch.zeros_like(value) if "o_proj" in name else value for name, value in weights.items()}
    save_file(blind, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: hf_models.draw(name, tmp_path_factory.mktemp(name)) for name in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    """Run all trials with one start of the ranks."""
    trials = {
        name: Trial(folders["qwen3_moe" if name == "EP2" else "qwen3"], layout, ROWS, HELD_OUT)
        for name, layout in FLAGS.items()
    }
    blind = draw_blind(tmp_path_factory.mktemp("blind"))
    answers = [other_answers(row) for row in ROWS]
    for name, rows in (("blind", ROWS), ("other context", OTHER_CONTEXT), ("other answers", answers)):
        trials[name] = Trial(blind, LAYOUTS["DP2"], rows, HELD_OUT)
    return run_ranks(run_trials, 2, trials)[0]


def twins_at(folder: Path, weights: Tensors | None = None) -> list[Twin]:
    """Build the twins in float32 and in float64, with the folder's weights or others."""
    twins = [Twin(folder, dtype) for dtype in (torch.float32, torch.float64)]
    for twin in twins if weights is not None else ():
        twin.model.load_state_dict(weights)
    return twins


def check_update(name: str, seen: Seen, rows: Sequence[Demonstration], twins: list[Twin]) -> None:
    with torch.no_grad():
        held_out = [twin.losses(plain(HELD_OUT)) for twin in twins]
    assert seen.evaluation["num_demonstrations"] == len(HELD_OUT)
    assert seen.evaluation["num_tokens"] == len(held_out[1])
    (theirs, their_gradients), (truth, true_gradients) = (twin.gradients(plain(rows)) for twin in twins)
    assert seen.metrics["demonstrations"] == len(rows)
    assert seen.metrics["tokens"]["response"] == len(truth)
    error, tensor = worst_of(seen.gradients, their_gradients, true_gradients)
    found = {
        "held-out loss": weighted_over_bound(seen.evaluation["loss"], held_out[1].mean().item(), *held_out),
        "loss": weighted_over_bound(seen.metrics["loss"], truth.mean().item(), theirs, truth),
        tensor: error,
    }
    print(f"{name}: error / bound: " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
    assert max(found.values()) <= 1


@pytest.mark.parametrize("layout", FLAGS)
def test_loss_and_gradients_equal_those_of_padded_sequences(layout, computed, folders) -> None:
    first, second = computed[layout]
    folder = folders["qwen3_moe" if layout == "EP2" else "qwen3"]
    check_update(f"{layout}, update 1", first, ROWS[:DEMONSTRATIONS_PER_UPDATE], twins_at(folder))
    assert all((second.weights[name] != value).any() for name, value in first.weights.items())
    # transformers joins the weights of experts, under names of its own.
    if layout != "EP2":
        later = twins_at(folder, second.weights)
        check_update(f"{layout}, update 2", second, ROWS[DEMONSTRATIONS_PER_UPDATE:], later)


def test_tokens_that_are_given_carry_no_loss(computed) -> None:
    # If tokens see only themselves, the tokens of users and systems change nothing, to the last bit.
    assert plain(OTHER_CONTEXT) != plain(ROWS)
    before, context, answers = (computed[name][0] for name in ("blind", "other context", "other answers"))
    assert context.metrics["loss"] == before.metrics["loss"]
    assert torch.equal(context.gradients["lm_head.weight"], before.gradients["lm_head.weight"])
    assert answers.metrics["loss"] != before.metrics["loss"]
