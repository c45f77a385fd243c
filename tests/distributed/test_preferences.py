"""Updates of --stage dpo in every layout, against the same computed by transformers from padded sequences.

Letters: P pairs.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.trainer.data.demonstrations import Pair, add_strangers
from tests import hf_models
from tests.distributed.supervised_trials import (
    DEMONSTRATIONS_PER_UPDATE,
    MICRO_BATCH_SIZE,
    NUM_UPDATES,
    Seen,
    Trial,
    run_trials,
)
from tests.distributed.training import CP2, LAYOUTS, OVERLAPPED
from tests.ranks import run_ranks
from tests.supervised_twin import Tensors, Twin
from tests.truth import mean_over_bound, worst_of

pytestmark = pytest.mark.each_change

BETA = 0.3
NAMES = ("TP2+SP", "PP2", "PP2xVPP2", "DP2+overlap", "EP2")
FLAGS = {name: LAYOUTS[name] for name in NAMES} | {"CP2, overlapped": f"{CP2} {OVERLAPPED}"}
ROUTED = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01"
OTHERS = {
    "ipo": "dpo --dpo-loss-type ipo", "simpo": "dpo --dpo-loss-type simpo --dpo-margin 0.2",
    "hinge": "dpo --dpo-loss-type hinge", "smoothed": "dpo --dpo-label-smoothing 0.1",
    "offloaded": "dpo --frozen-offload",
    "kto": "dpo --dpo-loss-type kto",
}  # fmt: skip


def draw_pairs(count: int, seed: int) -> list[Pair]:
    draw = np.random.default_rng(seed)

    def tokens(longest: int) -> np.ndarray:
        return draw.integers(0, hf_models.VOCAB_SIZE, int(draw.integers(1, longest))).astype(np.int32)

    pairs = []
    for number in range(count):
        prompt = tokens(20)
        pairs.append(Pair(f"row {number}", ((prompt, tokens(9)), (prompt, tokens(12)))))
    return pairs


ROWS = draw_pairs(DEMONSTRATIONS_PER_UPDATE * NUM_UPDATES, seed=3)
HELD_OUT = draw_pairs(5, seed=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draw models, and of each another one as its reference."""
    return {
        name: hf_models.draw(name.partition(" ")[0], tmp_path_factory.mktemp("model"), seed=len(name))
        for name in ("qwen3", "qwen3_moe", "qwen3 as reference", "qwen3_moe as reference")
    }


def model_of(layout: str) -> str:
    return "qwen3_moe" if layout == "EP2" else "qwen3"


@pytest.fixture(scope="module")
def computed(folders: dict[str, Path]) -> dict[str, list[Seen]]:
    """Run all trials with one start of the ranks."""

    def trial(layout: str, stage: str) -> Trial:
        name = model_of(layout)
        reference = "" if "simpo" in stage else f"--grpo-ref-model {folders[f'{name} as reference']}"
        rows, held_out = (add_strangers(one, 96) for one in (ROWS, HELD_OUT)) if "kto" in stage else (ROWS, HELD_OUT)
        return Trial(folders[name], FLAGS[layout], rows, held_out, f"{stage} --dpo-beta {BETA} {reference}")

    # An evaluation has no gradients, for which router losses are weighed.
    routed = dataclasses.replace(trial("EP2", "dpo"), layout=f"{FLAGS['EP2']} {ROUTED}")
    trials = (
        {"router losses": routed}
        | {name: trial(name, "dpo") for name in FLAGS}
        | {name: trial("PP2", words) for name, words in OTHERS.items()}
    )
    return run_ranks(run_trials, 2, trials)[0]


class PairTwin:
    """A model and its reference in one precision, and the papers' losses of whole sequences."""

    def __init__(self, folder: Path, reference: Path, dtype: torch.dtype, weights: Tensors | None = None):
        self.policy, self.reference = Twin(folder, dtype), Twin(reference, dtype)
        if weights is not None:
            self.policy.model.load_state_dict(weights)

    def losses(self, rows: Sequence[Pair], name: str = "dpo") -> torch.Tensor:
        chats = [[[turn.tolist() for turn in turns]] for row in rows for turns in row.sequences]
        lengths = torch.tensor([len(response) for [[_, response]] in chats])

        def sums(twin: Twin) -> torch.Tensor:
            return torch.stack([-part.sum() for part in twin.losses(chats).split(lengths.tolist())])

        beyond = sums(self.policy)
        if name != "simpo":
            with torch.no_grad():
                reference = sums(self.reference)
            beyond = beyond - reference
        if name == "kto":
            of_pairs = BETA * beyond.view(-1, 4)
            losses = []
            for part in of_pairs.split(MICRO_BATCH_SIZE):
                gained = part[:, 2:].mean().detach().clamp(min=0)
                losses.append(1 - (torch.sigmoid(part[:, 0] - gained) + torch.sigmoid(gained - part[:, 1])) / 2)
            return torch.cat(losses)
        margin, mean_margin = (one[::2] - one[1::2] for one in (beyond, beyond / lengths))
        if name == "ipo":
            return (mean_margin - 1 / (2 * BETA)) ** 2
        if name == "hinge":
            return torch.relu(1 - BETA * margin)
        logit = BETA * mean_margin - 0.2 if name == "simpo" else BETA * margin
        smoothing = 0.1 if name == "smoothed" else 0.0
        return -(1 - smoothing) * logit.sigmoid().log() - smoothing * (-logit).sigmoid().log()


def twins_at(folders: dict[str, Path], layout: str, weights: Tensors | None = None) -> list[PairTwin]:
    """Build the twins in float32 and in float64, with the folder's weights or others."""
    name = model_of(layout)
    folder, reference = folders[name], folders[f"{name} as reference"]
    return [PairTwin(folder, reference, dtype, weights) for dtype in (torch.float32, torch.float64)]


def check_update(
    seen: Seen, rows: Sequence[Pair], twins: list[PairTwin], name: str = "dpo", held_out_rows: Sequence[Pair] = HELD_OUT
) -> None:
    with torch.no_grad():
        held_out = [twin.losses(held_out_rows, name) for twin in twins]
    assert seen.evaluation["num_pairs"] == len(HELD_OUT)
    losses, gradients = [], []
    for twin in twins:
        losses.append(twin.losses(rows, name))
        losses[-1].mean().backward()
        gradients.append(hf_models.gradients_of(twin.policy.model))
    assert seen.metrics["pairs"] == len(rows)
    error, tensor = worst_of(seen.gradients, *gradients)
    theirs, truth = (one.detach() for one in losses)
    found = {
        "held-out loss": mean_over_bound(seen.evaluation["loss"], *held_out),
        "loss": mean_over_bound(seen.metrics["loss"], theirs, truth),
        tensor: error,
    }
    print("error / bound: " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
    assert max(found.values()) <= 1


@pytest.mark.parametrize("layout", FLAGS)
def test_loss_and_gradients_equal_those_of_padded_sequences(layout, computed, folders) -> None:
    first, second = computed[layout]
    check_update(first, ROWS[:DEMONSTRATIONS_PER_UPDATE], twins_at(folders, layout))
    assert all((second.weights[name] != value).any() for name, value in first.weights.items())
    # transformers joins the weights of experts, under names of its own.
    if layout != "EP2":
        check_update(second, ROWS[DEMONSTRATIONS_PER_UPDATE:], twins_at(folders, layout, second.weights))


@pytest.mark.parametrize("name", ["hinge", "ipo", "kto", "simpo", "smoothed"])
def test_other_losses_of_pairs_equal_their_formulas(name, computed, folders) -> None:
    rows, held_out = (add_strangers(one, 96) for one in (ROWS, HELD_OUT)) if name == "kto" else (ROWS, HELD_OUT)
    check_update(computed[name][0], rows[:DEMONSTRATIONS_PER_UPDATE], twins_at(folders, "PP2"), name, held_out)


def test_a_reference_in_host_memory_changes_no_bit(computed) -> None:
    for ours, other in zip(computed["offloaded"], computed["PP2"], strict=True):
        assert ours.metrics == other.metrics
        assert all(torch.equal(value, other.gradients[name]) for name, value in ours.gradients.items())


def test_router_losses_are_trained_on_and_not_evaluated(computed) -> None:
    ours, other = computed["router losses"][0], computed["EP2"][0]
    assert ours.evaluation == other.evaluation
    assert any((ours.gradients[name] != value).any() for name, value in other.gradients.items())


def test_metrics_tell_which_response_the_policy_prefers(computed) -> None:
    seen = computed["TP2+SP"][0]
    described = seen.metrics["preference"]
    assert described["margin"] == described["chosen"] - described["rejected"]
    assert 0 < described["accuracy"] < 1
    prompts = sum(len(row.prompt) for row in ROWS[:DEMONSTRATIONS_PER_UPDATE])
    responses = sum(len(one) for row in ROWS[:DEMONSTRATIONS_PER_UPDATE] for one in row.responses)
    assert (seen.metrics["tokens"]["prompt"], seen.metrics["tokens"]["response"]) == (prompts, responses)
