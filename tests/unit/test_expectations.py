"""The expected gradient of every combination of estimator, place, advantage and aggregation that flags accept.

Nothing is sampled: `tests/exact.py` enumerates every draw, and differentiates the expectation for the truth. A gradient
that differs from the truth is refused by the flags, or its bias is in a table of docs/algorithms.md with this figure.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.errors import UsageError
from tests.command_lines import DENSE, keep_one_parser, parse
from tests.exact import BASELINE, PROMPTS, WEIGHTS, Prompt, expect_gradient, find_bias, find_truth

ADVANTAGES = ("grpo", "mean", "rloo", "batch", "global", "gdpo")
ESTIMATORS = ("k1", "k2", "k3", "k3+", "unbiased")
PLACES = ("reward", "loss")
AGGREGATIONS = ("constant", "sequence", "token")
BETA = 0.3
EXACT = 1e-9
DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
Part = tuple[str, str] | None
"""The estimator of a divergence and its place; None without one."""


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def make_config(advantage: str = "rloo", divergence: Part = None, aggregation: str = "constant") -> AlgorithmConfig:
    more: dict[str, Any] = {}
    if divergence is not None:
        more = {"kl_beta": BETA, "kl_estimator": divergence[0], "kl_in": divergence[1]}
    return AlgorithmConfig(loss="reinforce", advantage=advantage, aggregation=aggregation, **more)  # type: ignore[arg-type]


def is_accepted(advantage: str = "rloo", divergence: Part = None, more: str = "") -> bool:
    """Check that the flags may be written; nothing else is wrong with the command line."""
    words = f"--grpo-advantage {advantage} {more}"
    if divergence is not None:
        words += f" --grpo-kl-beta {BETA} --grpo-kl-estimator {divergence[0]} --grpo-kl-in {divergence[1]}"
    try:
        parse(*DENSE, words)
    except UsageError:
        return False
    return True


def find_rest(advantage: str, divergence: Part, aggregation: str) -> float:
    """Return the rest of the expected gradient beside the true one; in a loss, of the divergence at given tokens."""
    is_fixed = divergence is not None and divergence[1] == "loss"
    truth = find_truth(PROMPTS, 0.0 if divergence is None else BETA, is_fixed)
    return find_bias(expect_gradient(make_config(advantage, divergence, aggregation)), truth).rest


def find_share(divergence: tuple[str, str], is_fixed: bool) -> tuple[float, float]:
    """Return the share and rest of the divergence alone: rewards are all equal."""
    found = expect_gradient(make_config("rloo", divergence), group_size=2, is_constant=True)
    bias = find_bias(found, find_truth(PROMPTS, BETA, is_fixed, reward=0.0))
    return bias.share, bias.rest


def read_table(head: str) -> dict[str, list[str]]:
    """Read the figures of a table's rows on the page, by their first cells."""
    lines = DOCS.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(head))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in itertools.takewhile(bool, lines[first + 2 :])
    ]
    return {row[0].replace("`", ""): [cell for cell in row[1:] if is_figure(cell)] for row in rows}


def is_figure(cell: str) -> bool:
    return cell.replace(".", "").isdecimal()


def write(number: float) -> str:
    return "0" if abs(number) < EXACT else f"{number:.3f}"


def test_only_k1_is_accepted_in_the_reward_where_it_alone_has_the_divergences_gradient() -> None:
    for estimator in ESTIMATORS:
        share, rest = find_share((estimator, "reward"), is_fixed=False)
        if estimator == "k1":
            assert math.isclose(share, 1, rel_tol=EXACT)
            assert rest < EXACT
        else:
            assert share < 0.2
        assert is_accepted("rloo", (estimator, "reward")) == (estimator == "k1")


def test_in_the_loss_k1_of_the_divergence_is_refused_without_a_gradient_and_only_k3_is_biased_at_given_tokens() -> None:
    for estimator in ESTIMATORS:
        share, rest = find_share((estimator, "loss"), is_fixed=True)
        assert is_accepted("rloo", (estimator, "loss")) == (estimator != "k1")
        if estimator == "k1":
            assert abs(share) < EXACT
        else:
            assert (math.isclose(share, 1, rel_tol=EXACT) and rest < EXACT) == (estimator != "k3")


@pytest.mark.parametrize(("scale", "most"), [(0.1, 0.02), (0.5, 0.2)])
def test_over_fifty_tokens_k2_and_k3_have_next_to_nothing_of_the_divergences_gradient_in_the_reward(
    scale, most
) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(50, generator=draw, dtype=torch.float64).requires_grad_()
    reference = (logits.detach() + scale * torch.randn(50, generator=draw, dtype=torch.float64)).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (truth,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    for estimator in ("k1", "k2", "k3"):
        config = make_config("rloo", (estimator, "reward"))
        leaf = policy.detach().clone().requires_grad_()
        numbers, ones = torch.arange(50), torch.ones(50, dtype=torch.int64)
        total, _ = Objective(config, 1).loss(
            RoleLogProbs(leaf, leaf.detach(), {"reference": reference}),
            leaf.detach(),
            torch.zeros_like(leaf),
            numbers,
            ones,
        )
        (slopes,) = torch.autograd.grad(total, leaf)
        weighed = (slopes * policy.detach().exp() * policy).sum()
        (found,) = torch.autograd.grad(weighed, logits, retain_graph=True)
        share = find_bias(found / BETA, truth).share
        assert math.isclose(share, 1, rel_tol=EXACT) if estimator == "k1" else share < most


def test_the_estimator_that_holds_without_a_flag_is_one_that_the_place_accepts() -> None:
    assert [AlgorithmConfig(kl_in=place).kl_estimator for place in PLACES] == ["k1", "k3"]
    for name in ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert parse(*DENSE, f"--algorithm {name} --grpo-kl-beta 0.1").algorithm.kl_estimator == "k1"
        if name == "rloo":
            words = f"--algorithm {name} --grpo-kl-beta 0.1 --grpo-kl-in loss"
            assert parse(*DENSE, words).algorithm.kl_estimator == "k3"


def test_the_figures_of_the_page_are_those_that_are_computed() -> None:
    advantages = {
        name: [write(find_rest(name, part, "constant")) for part in (None, ("k1", "reward"))] for name in ADVANTAGES
    }
    assert read_table("| `--grpo-advantage` | left over") == advantages
    estimators = {}
    for name, place in itertools.product(ESTIMATORS, PLACES):
        if is_accepted("rloo", (name, place)):
            both = [find_share((name, place), is_fixed) for is_fixed in (False, True)]
            estimators[f"{name} in the {place}"] = [cell for pair in both for cell in map(write, pair)]
    assert read_table("| `--grpo-kl-estimator` | of whole responses") == estimators
    aggregations = {name: [write(find_rest("rloo", None, name))] for name in AGGREGATIONS}
    assert read_table("| `--grpo-aggregation` | left over") == aggregations


@pytest.mark.each_change
def test_every_combination_of_flags_has_the_true_gradient_or_a_part_whose_bias_is_on_the_page() -> None:
    of_advantages = read_table("| `--grpo-advantage` | left over")
    of_estimators = read_table("| `--grpo-kl-estimator` | of whole responses")
    of_aggregations = read_table("| `--grpo-aggregation` | left over")
    num_exact = 0
    divergences: list[Part] = [None, *itertools.product(ESTIMATORS, PLACES)]
    for advantage, divergence in itertools.product(ADVANTAGES, divergences):
        if not is_accepted(advantage, divergence):
            continue
        for aggregation in AGGREGATIONS:
            said = [of_advantages[advantage][divergence is not None], *of_aggregations[aggregation]]
            if divergence is not None:
                # Whole responses in the reward, given tokens in the loss.
                row = of_estimators[f"{divergence[0]} in the {divergence[1]}"]
                said.append(row[1] if divergence[1] == "reward" else row[3])
            is_exact = find_rest(advantage, divergence, aggregation) < EXACT
            assert is_exact == (set(said) == {"0"}), (advantage, divergence, aggregation, said)
            num_exact += is_exact
    # rloo without a divergence, with k1, k2, k3+ and unbiased, and mean without one.
    assert num_exact == 6


@pytest.mark.parametrize("divergence", [None, ("k1", "reward")], ids=str)
@pytest.mark.parametrize("advantage", ["batch", "global", "gdpo"])
def test_advantages_divided_by_a_deviation_have_the_expected_gradient_of_their_paper(advantage, divergence) -> None:
    config = make_config(advantage, divergence, "token")
    found = expect_gradient(config, group_size=2)
    expected = expect_by_the_paper(advantage, 0.0 if divergence is None else BETA, group_size=2)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-9)


def expect_by_the_paper(advantage: str, beta: float, group_size: int) -> torch.Tensor:
    """Return the expectation over every pair of groups.

    REINFORCE++'s advantages of tokens are normalized over tokens, GDPO's over responses.
    """
    tables = [list_table(prompt) for prompt in PROMPTS]
    total = torch.zeros(sum(prompt.logits.numel() for prompt in PROMPTS), dtype=torch.float64)
    numbers = [range(len(prompt.responses)) for prompt in PROMPTS]
    for groups in itertools.product(*(itertools.product(of, repeat=group_size) for of in numbers)):
        chance, tokens, squares = 1.0, [], []
        for place, group in enumerate(groups):
            prompt = PROMPTS[place]
            of_group = normalize_group(prompt, group, advantage)
            for number, base in zip(group, of_group, strict=True):
                log_chance, divergences, scores = tables[place][number]
                chance *= math.exp(log_chance)
                used = [base - beta * sum(divergences[token:]) for token in range(len(divergences))]
                tokens += [(place, value, score) for value, score in zip(used, scores, strict=True)]
                squares.append([value**2 for value in used])
        mean = np.mean([np.mean(one) for one in squares]) if advantage == "gdpo" else np.mean(np.concatenate(squares))
        size = PROMPTS[0].logits.numel()
        for place, value, score in tokens:
            weight = chance * value / (math.sqrt(mean) + 1e-6) / len(tokens)
            total[place * size : (place + 1) * size] += weight * score
    # As `expect_gradient` counts.
    return total * len(PROMPTS) * 2


def normalize_group(prompt: Prompt, group: tuple[int, ...], advantage: str) -> list[float]:
    if advantage == "gdpo":
        total = np.zeros(len(group))
        for name, weight in WEIGHTS.items():
            values = np.array([prompt.components[name][number] for number in group])
            total += weight * (values - values.mean()) / (values.std() + 1e-6)
        return total.tolist()
    rewards = np.array([float(prompt.rewards[number]) for number in group])
    return (rewards - (BASELINE if advantage == "global" else rewards.mean())).tolist()


def list_table(prompt: Prompt) -> list[tuple[float, list[float], list[torch.Tensor]]]:
    """List the log-prob of each response, and the divergence and the gradient of the log-prob of each of its tokens."""
    logits = prompt.logits.clone().requires_grad_()
    rows = []
    for live, frozen in zip(prompt.log_probs(logits), prompt.log_probs(prompt.reference), strict=True):
        scores = [torch.autograd.grad(one, logits, retain_graph=True)[0].flatten() for one in live]
        rows.append((float(live.detach().sum()), (live.detach() - frozen).tolist(), scores))
    return rows


def test_dropping_groups_of_equal_rewards_weighs_prompts_and_with_global_it_points_elsewhere_and_is_refused() -> None:
    """Take one prompt by itself: a group without a signal has no gradient of `rloo`, and one of `global`."""
    truth = find_truth(PROMPTS, 0.0)
    size = len(truth) // 2
    for advantage in ("rloo", "global"):
        found = expect_gradient(make_config(advantage), is_filtered=True)
        rests = [find_bias(found[part], truth[part]).rest for part in (slice(size), slice(size, None))]
        assert (max(rests) < EXACT) == (advantage == "rloo"), rests
        more = "--grpo-filter-groups-with-same-reward"
        assert is_accepted(advantage, None, more) == (advantage == "rloo")
    assert max(rests) > 0.1
