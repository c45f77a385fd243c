"""Advantages, losses and denominators, as a reader of the GRPO papers expects them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.library import ADVANTAGES
from megatron_rl.algorithm.objective import Objective, RoleLogProbs, Statistics, combine_statistics
from megatron_rl.algorithm.settings import AlgorithmConfig
from tests.truth import error_over_bound

SUMMED = sorted(name for name, advantage in ADVANTAGES.items() if not advantage.takes_components)
rewards = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=12).map(np.array)


def compute_advantages(name: str, rewards: np.ndarray) -> np.ndarray:
    return GroupAdvantages(AlgorithmConfig(advantage=name))(SimpleNamespace(rewards=rewards, components={}))


@pytest.mark.parametrize("name", SUMMED)
@given(rewards, st.integers(-8, 8))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_the_rewards(name, values, shift):
    values = np.round(values * 16) / 16
    advantages = compute_advantages(name, values)
    assert abs(advantages.sum()) < 1e-5 * max(1.0, np.abs(advantages).max())
    # Sixteenths are shifted exactly.
    assert np.allclose(compute_advantages(name, values + shift), advantages, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SUMMED)
@given(st.floats(-1e6, 1e6), st.integers(2, 17))
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(name, value, count):
    assert not compute_advantages(name, np.full(count, value)).any()


def test_grpo_divides_by_the_populations_deviation():
    assert np.allclose(
        compute_advantages("grpo", np.array([0.0, 1.0, 1.0, 2.0])), np.array([-1, 0, 0, 1]) / math.sqrt(0.5), 1e-5
    )


def test_leave_one_out_subtracts_the_mean_of_the_other_rewards():
    values = np.array([0.0, 1.0, 5.0])
    assert np.allclose(compute_advantages("rloo", values), values - np.array([3.0, 2.5, 0.5]))


def micro_batch(lengths: list[int], seed: int = 0, spread: float = 0.5) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = -3 * torch.rand(count, generator=draw)
    return {
        "policy": (old + spread * torch.randn(count, generator=draw)).requires_grad_(),
        "old": old,
        "reference": old + spread * torch.randn(count, generator=draw),
        "engine": old + 0.01 * torch.randn(count, generator=draw),
        "advantages": torch.randn(len(lengths), generator=draw)[sequences],
        "sequences": sequences,
        "lengths": torch.tensor(lengths),
    }


def loss_of(config: AlgorithmConfig, batch: dict[str, torch.Tensor], with_reference: bool = True):
    objective = Objective(config, max_tokens=20)
    roles = RoleLogProbs(batch["policy"], batch["old"], batch["reference"] if with_reference else None)
    total, statistics = objective.loss(
        roles, batch["engine"], batch["advantages"], batch["sequences"], batch["lengths"]
    )
    return total, statistics, objective.share(len(batch["old"]), len(batch["lengths"]))


def by_the_formula(config: AlgorithmConfig, batch: dict[str, torch.Tensor], number: type) -> float:
    """Compute token by token, in numpy's numbers of that precision."""
    totals = [number(0.0)] * len(batch["lengths"])
    names = ("policy", "old", "reference", "engine", "advantages")
    values = zip(*(map(number, batch[name].tolist()) for name in names), batch["sequences"].tolist(), strict=True)
    for policy, old, reference, engine, advantage, sequence in values:
        ratio = np.exp(policy - old)
        clipped = min(max(ratio, 1 - config.clamp_eps_lower), 1 + config.clamp_eps_upper)
        loss = -min(ratio * advantage, clipped * advantage)
        if config.importance_correction:
            loss *= min(np.exp(old - engine), config.importance_truncation or math.inf)
        loss += config.kl_beta * (np.exp(reference - policy) - (reference - policy) - 1)
        totals[sequence] += loss
    lengths = batch["lengths"].tolist()
    return {
        "token": sum(totals) / sum(lengths),
        "sequence": sum(t / n for t, n in zip(totals, lengths, strict=True)) / len(lengths),
        "constant": sum(totals) / (len(lengths) * 20),
    }[config.aggregation]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("importance_correction", [False, True])
def test_the_loss_equals_its_formula(aggregation, importance_correction):
    config = AlgorithmConfig(
        kl_beta=0.05, clamp_eps_lower=0.1, clamp_eps_upper=0.3, aggregation=aggregation,
        importance_correction=importance_correction, importance_truncation=1.005 if importance_correction else None,
    )  # fmt: skip
    batch = micro_batch([3, 1, 20, 7])
    total, _, share = loss_of(config, batch)
    theirs, truth = (by_the_formula(config, batch, number) for number in (np.float32, np.float64))
    assert error_over_bound(total.detach() / share, torch.tensor(theirs), torch.tensor(truth)) <= 1


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_loss_of_an_update_does_not_depend_on_how_responses_are_packed(aggregation):
    config = AlgorithmConfig(kl_beta=0.05, aggregation=aggregation)
    lengths = [3, 1, 20, 7, 4]
    batch = micro_batch(lengths)
    whole, _, share = loss_of(config, batch)
    exact = {name: value.detach().double() if value.is_floating_point() else value for name, value in batch.items()}
    exact["policy"].requires_grad_()
    truth, _, _ = loss_of(config, exact)
    (theirs,), (gradient,) = (
        torch.autograd.grad(*pair) for pair in ((whole, batch["policy"]), (truth, exact["policy"]))
    )
    totals, ours, shares, first = [], [], 0, 0
    for response, length in enumerate(lengths):
        rows = slice(first, first + length)
        part = {name: value[rows] for name, value in batch.items() if name not in ("lengths", "sequences")}
        part |= {
            "sequences": torch.zeros(length, dtype=torch.int64),
            "lengths": batch["lengths"][response : response + 1],
        }
        loss, _, own_share = loss_of(config, part)
        (own,) = torch.autograd.grad(loss, batch["policy"])
        ours.append(own[rows])
        totals.append(loss.detach())
        shares, first = shares + own_share, first + length
    assert shares == share
    assert error_over_bound(torch.cat(ours), theirs, gradient) <= 1
    assert error_over_bound(sum(totals), whole.detach(), truth.detach()) <= 1


def test_a_token_whose_ratio_is_clipped_has_no_gradient_and_is_counted():
    batch = micro_batch([40, 40], spread=1.0)
    config = AlgorithmConfig(clamp_eps_lower=0.2, clamp_eps_upper=0.2)
    total, statistics, _ = loss_of(config, batch, with_reference=False)
    (gradient,) = torch.autograd.grad(total, batch["policy"])
    num_clipped = statistics.sums["clipped_low"].item() + statistics.sums["clipped_high"].item()
    assert num_clipped == (gradient == 0).sum().item() > 10


def test_at_the_first_update_the_gradient_is_that_of_the_log_probs_times_the_advantages():
    batch = micro_batch([5, 9])
    batch["policy"] = batch["old"].clone().requires_grad_()
    total, statistics, _ = loss_of(AlgorithmConfig(), batch, with_reference=False)
    (gradient,) = torch.autograd.grad(total, batch["policy"])
    assert torch.equal(gradient, -batch["advantages"])
    assert statistics.sums["ratio"].item() == 14


def test_a_maximum_over_values_with_nan_is_nan():
    values = [float("nan"), 1.0, 3.0]
    many = [Statistics({}, {"mismatch": torch.tensor(value)}) for value in values]
    assert math.isnan(combine_statistics(many)[1]["mismatch"])
    assert math.isnan(combine_statistics(many[::-1])[1]["mismatch"])
    assert combine_statistics(many[1:])[1]["mismatch"] == 3.0
