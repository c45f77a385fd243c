"""Every loss, divergence and correction against its formula, written again in numpy, response by response.

Letters: N targets.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithm import advantages, objective
from megatron_rl.algorithm.declaration import RoleLogProbs, Surrogate
from megatron_rl.algorithm.library import LOSSES
from megatron_rl.algorithm.objective import Objective, Statistics
from megatron_rl.algorithm.roles import reference
from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.algorithm.settings import AlgorithmConfig
from tests.truth import error_over_bound

MAX_TOKENS = 300
LEAST_EFFECT = 1e-3
NARROW = {"clamp_eps_lower": 0.1, "clamp_eps_upper": 0.15}
CONFIGS = {
    "clip": AlgorithmConfig(kl_beta=0.05, kl_estimator="k3", **NARROW),
    "dual clip": AlgorithmConfig(dual_clip=1.3, kl_beta=0.05, kl_estimator="unbiased", **NARROW),
    "gspo": AlgorithmConfig(loss="gspo", clamp_eps_lower=0.02, clamp_eps_upper=0.03, aggregation="sequence"),
    "gspo, dual clip": AlgorithmConfig(loss="gspo", clamp_eps_lower=0.02, clamp_eps_upper=0.03, dual_clip=1.04),
    "cispo": AlgorithmConfig(loss="cispo", kl_beta=0.05, kl_estimator="k3+", **NARROW),
    "sapo": AlgorithmConfig(
        loss="sapo", sapo_temperature_neg=1.4, aggregation="sequence", kl_beta=0.05, kl_estimator="k2"
    ),
    "dppo": AlgorithmConfig(loss="dppo", dppo_divergence=0.03, kl_beta=0.05, kl_estimator="k3"),
    "reinforce": AlgorithmConfig(
        loss="reinforce", aggregation="constant", kl_beta=0.05, kl_in="reward"
    ),
    "clip, divergence in the reward": AlgorithmConfig(kl_beta=0.05, kl_in="reward", **NARROW),
    "truncated tokens": AlgorithmConfig(importance_correction=True, importance_truncation=1.05, correction_lower=0.9),
    "masked tokens": AlgorithmConfig(
        importance_correction=True, importance_truncation=1.05, correction_lower=0.9, correction_mode="mask"
    ),
    "truncated responses": AlgorithmConfig(
        importance_correction=True, importance_truncation=1.1, correction_level="sequence"
    ),
    "masked responses": AlgorithmConfig(
        importance_correction=True, importance_truncation=1.2, correction_level="sequence", correction_mode="mask"
    ),
    "geometric means": AlgorithmConfig(
        importance_correction=True, importance_truncation=1.2, correction_lower=0.8, correction_level="geometric"
    ),
    "rejected responses": AlgorithmConfig(reject_below=0.99, reject_above=1.02, aggregation="sequence"),
    "entropy": AlgorithmConfig(entropy_coef=0.3, aggregation="sequence"),
}  # fmt: skip
NAMES = ("policy", "old", "reference", "engine", "advantages", "entropies")

Batch = dict[str, torch.Tensor]


def draw_batch(lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.2) -> Batch:
    draw = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(sum(lengths), generator=draw, dtype=torch.float64)

    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = -3 * torch.rand(len(sequences), generator=draw, dtype=torch.float64)
    batch = {
        "policy": old + normal(spread), "old": old, "reference": old + normal(0.5), "engine": old + normal(0.1),
        "advantages": torch.randn(len(lengths), generator=draw, dtype=torch.float64)[sequences],
        "entropies": 2 + normal(0.3),
    }  # fmt: skip
    batch = {name: value.to(dtype) for name, value in batch.items()}
    return {**batch, "sequences": sequences, "lengths": torch.tensor(lengths)}


def compute(config: AlgorithmConfig, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Statistics]:
    """Return the sum over an update's denominator, its gradient by the policy's log-probs, and the statistics."""
    policy = batch["policy"].clone().requires_grad_()
    objective = Objective(config, MAX_TOKENS)
    roles = RoleLogProbs(
        policy,
        batch["old"],
        {"reference": batch["reference"]} if config.kl_beta else {},
        batch["entropies"] if config.entropy_coef else None,
    )
    total, statistics = objective.loss(
        roles, batch["engine"], batch["advantages"], batch["sequences"], batch["lengths"]
    )
    total = total / objective.share(len(policy), len(batch["lengths"]))
    (gradient,) = torch.autograd.grad(total, policy)
    return total.detach(), gradient, statistics


def formula(config: AlgorithmConfig, batch: Batch) -> tuple[float, np.ndarray]:
    """Return the loss and its gradient, response by response, in the precision of the batch."""
    columns = [batch[name].numpy() for name in NAMES]
    lengths = batch["lengths"].tolist()
    total, gradients, first = 0.0, [], 0
    for length in lengths:
        loss_T, gradient_T = _of_response(config, *(column[first : first + length] for column in columns))
        weight = {
            "token": 1 / sum(lengths),
            "sequence": 1 / (length * len(lengths)),
            "constant": 1 / (len(lengths) * MAX_TOKENS),
        }[config.aggregation]
        total += weight * loss_T.sum()
        gradients.append(weight * gradient_T)
        first += length
    return total, np.concatenate(gradients)


def _of_response(
    config: AlgorithmConfig, policy: Any, old: Any, reference: Any, engine: Any, advantage: Any, entropy: Any
) -> tuple[Any, Any]:
    """Return the losses of a response's tokens, and the derivative of each by its log-prob."""
    ratio = np.exp(policy - old)
    kl, slope = _divergence(config.kl_estimator, (old if config.kl_in == "reward" else policy) - reference, ratio)
    if config.kl_in == "reward" and config.kl_beta:
        advantage = advantage - config.kl_beta * np.array([kl[place:].sum() for place in range(len(kl))])
    low, high = 1 - config.clamp_eps_lower, 1 + config.clamp_eps_upper
    if config.loss == "gspo":
        ratio = np.full_like(ratio, np.exp((policy - old).mean()))
    if config.loss in ("clip", "gspo"):
        is_free = np.where(advantage > 0, ratio <= high, ratio >= low)
        if config.dual_clip is not None:
            is_free &= (advantage >= 0) | (ratio <= config.dual_clip)
        most = np.where(advantage > 0, high, math.inf if config.dual_clip is None else config.dual_clip)
        bounded = np.where(advantage > 0, np.minimum(ratio, most), np.minimum(np.maximum(ratio, low), most))
        loss, gradient = -bounded * advantage, -(is_free * ratio * advantage)
    elif config.loss == "cispo":
        weight = np.minimum(np.maximum(ratio, low), high)
        loss, gradient = -weight * advantage * policy, -weight * advantage
    elif config.loss == "sapo":
        steep = np.where(advantage > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        gate = 1 / (1 + np.exp(-steep * (ratio - 1)))
        loss, gradient = -4 / steep * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage
    elif config.loss == "dppo":
        moved = np.exp(policy) - np.exp(old)
        is_kept = np.where(advantage > 0, moved <= config.dppo_divergence, moved >= -config.dppo_divergence)
        loss, gradient = (-(is_kept * ratio * advantage),) * 2
    else:
        loss, gradient = -advantage * policy, -advantage
    weight = _weight(config, old - engine)
    loss, gradient = loss * weight, gradient * weight
    if config.kl_in == "loss":
        loss, gradient = loss + config.kl_beta * kl, gradient + config.kl_beta * slope
    return loss - config.entropy_coef * entropy, gradient


def _divergence(name: str, away: Any, ratio: Any) -> tuple[Any, Any]:
    """Return the estimate, and its derivative by the policy's log-prob."""
    third = np.exp(-away) + away - 1
    return {
        "k1": (away, np.ones_like(away)),
        "k2": (away**2 / 2, away),
        "k3": (third, 1 - np.exp(-away)),
        "k3+": (third, away),
        "unbiased": (ratio * third, ratio * (third + 1 - np.exp(-away))),
    }[name]


def _weight(config: AlgorithmConfig, away: Any) -> Any:
    weight = np.ones_like(away)
    if config.importance_correction:
        low, high = config.correction_lower or 0.0, config.importance_truncation or math.inf
        level = {"token": away, "sequence": away.sum(), "geometric": away.mean()}[config.correction_level]
        weight = weight * np.exp(level)
        is_inside = (weight >= low) & (weight <= high)
        weight = weight * is_inside if config.correction_mode == "mask" else np.minimum(np.maximum(weight, low), high)
    mean = np.exp(away.mean())
    return weight * ((config.reject_below or 0.0) <= mean <= (config.reject_above or math.inf))


def near(found: Any, expected: Any) -> bool:
    return bool(np.allclose(found, expected, rtol=1e-9, atol=1e-12))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@settings(max_examples=30)
@given(
    st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=5), st.integers(0, 10**6), st.sampled_from([0, 0.2, 1])
)
def test_the_loss_and_its_gradient_equal_their_formulas(config, lengths, seed, spread) -> None:
    batch = draw_batch(lengths, seed, spread=spread)
    total, gradient, statistics = compute(config, batch)
    expected, slopes = formula(config, batch)
    assert near(total, expected)
    if spread:
        assert near(gradient, slopes)
    assert statistics.sums["targets"] == sum(lengths)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_in_float32_the_loss_is_as_near_to_the_truth_as_numpys(config) -> None:
    exact = draw_batch([3, 1, 20, 7, 40, 11], seed=4)
    # The same numbers in both precisions.
    batch = {name: value.float() if value.is_floating_point() else value for name, value in exact.items()}
    exact = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    (total, gradient, _), theirs, truth = compute(config, batch), formula(config, batch), formula(config, exact)
    for ours, other, true in ((total, theirs[0], truth[0]), (gradient, theirs[1], truth[1])):
        other = torch.as_tensor(np.asarray(other, dtype=np.float32))
        assert error_over_bound(ours, other, torch.as_tensor(np.asarray(true))) <= 1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_loss_depends_on_how_responses_are_packed(config) -> None:
    lengths = [3, 1, 20, 7, 150]
    batch = draw_batch(lengths, seed=2)
    total, gradient, _ = compute(config, batch)
    objective, weighed, parts, shares, first = Objective(config, MAX_TOKENS), 0.0, [], [], 0
    whole = objective.share(sum(lengths), len(lengths))
    for number, length in enumerate(lengths):
        part = {name: batch[name][first : first + length] for name in NAMES}
        part |= {"sequences": torch.zeros(length, dtype=torch.int64), "lengths": batch["lengths"][number : number + 1]}
        own, slope, _ = compute(config, part)
        share = objective.share(length, 1) / whole
        weighed += float(own) * share
        parts.append(slope * share)
        shares.append(objective.share(length, 1))
        first += length
    assert sum(shares) == whole
    assert near(weighed, total)
    assert near(torch.cat(parts), gradient)


@pytest.mark.parametrize("name", ["clip", "dual clip", "gspo", "cispo", "dppo", "truncated tokens", "masked responses"])
def test_tokens_beyond_a_bound_are_counted(name) -> None:
    lengths = [40, 40, 25, 6, 5, 12, 8]
    config, batch = CONFIGS[name], draw_batch(lengths, seed=1, spread=0.3)
    *_, statistics = compute(config, batch)
    counted = {name: int(value) for name, value in statistics.sums.items() if "clipped" in name or "bounded" in name}
    if config.loss == "cispo":
        ratio = (batch["policy"] - batch["old"]).exp()
        assert counted == {"clipped_low": (ratio < 0.9).sum(), "clipped_high": (ratio > 1.15).sum()}
    elif config.importance_correction:
        away = batch["old"] - batch["engine"]
        values = np.split(away.numpy(), np.cumsum(lengths)[:-1])
        if config.correction_level == "token":
            outside = ((away.exp() > 1.05) | (away.exp() < 0.9)).sum()
        else:
            outside = sum(len(part) for part in values if np.exp(part.sum()) > 1.2)
        assert counted["correction.bounded"] == outside > 10
    else:
        _, without, _ = compute(dataclasses.replace(config, kl_beta=0.0), batch)
        assert sum(counted.values()) == (without == 0).sum() > 10


FAULTS: dict[str, tuple[str, Any]] = {
    "clip bounds exchanged": ("clip", lambda: _swap_bounds(LOSSES["clip"].compute)),
    "the bounds of gspo for tokens": ("gspo", lambda: mock.patch.object(Sequences, "mean", lambda self, value: value)),
    "a sequence's mean over padded length": (
        "gspo",
        lambda: mock.patch.object(Sequences, "mean", lambda self, value: self.sum(value) / self.max_tokens),
    ),
    "a weight that is not held fixed": ("cispo", lambda: _with("cispo", _cispo_with_gradient)),
    "the gate's steepness of the other sign": ("sapo", lambda: _swap_gates(LOSSES["sapo"].compute)),
    "the trust region of ratios, not of probabilities": ("dppo", lambda: _with("dppo", LOSSES["clip"].compute)),
    "the wrong denominator": (
        "reinforce",
        lambda: mock.patch("megatron_rl.algorithm.objective.count_share", lambda _, targets, *__: targets),
    ),
    "a response's weight of one over the longest": (
        "sapo",
        lambda: mock.patch.dict(objective.WEIGHTS, sequence=lambda one, loss: loss / MAX_TOKENS),
    ),
    "the divergence of the tokens before": (
        "clip, divergence in the reward",
        lambda: mock.patch.object(Sequences, "sum_from", lambda self, value: self.sum(value) - _later(self, value)),
    ),
    "k3 for k3+": ("cispo", lambda: mock.patch.dict(reference.DIVERGENCES, {"k3+": reference._k3})),
    "k3 without the ratio": (
        "dual clip",
        lambda: mock.patch.dict(reference.DIVERGENCES, {"unbiased": reference._k3}),
    ),
    "a product in place of a mean": (
        "geometric means",
        lambda: mock.patch.dict(objective.LEVELS, geometric=lambda one, log: one.sum(log)),
    ),
    "truncated, not masked": (
        "masked tokens",
        lambda: mock.patch.object(torch.Tensor, "masked_fill", lambda self, *_: self),
    ),
}  # fmt: skip

_sum_from = Sequences.sum_from


def _later(sequences: Sequences, value: torch.Tensor) -> torch.Tensor:
    return _sum_from(sequences, value) - value


def _with(name: str, surrogate: Any) -> Any:
    return mock.patch.dict(LOSSES, {name: dataclasses.replace(LOSSES[name], compute=surrogate)})


def _swap_bounds(surrogate: Any) -> Any:
    def swapped(targets: Any, config: AlgorithmConfig) -> Any:
        low, high = config.clamp_eps_upper, config.clamp_eps_lower
        return surrogate(targets, dataclasses.replace(config, clamp_eps_lower=low, clamp_eps_upper=high))

    return _with("clip", swapped)


def _swap_gates(surrogate: Any) -> Any:
    def swapped(targets: Any, config: AlgorithmConfig) -> Any:
        pos, neg = config.sapo_temperature_neg, config.sapo_temperature_pos
        return surrogate(targets, dataclasses.replace(config, sapo_temperature_pos=pos, sapo_temperature_neg=neg))

    return _with("sapo", swapped)


def _cispo_with_gradient(targets: Any, config: AlgorithmConfig) -> Surrogate:
    ratio_N = targets.ratio_N.clamp(1 - config.clamp_eps_lower, 1 + config.clamp_eps_upper)
    return Surrogate(-ratio_N * targets.advantages_N * targets.policy_N, ratio_N)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_moves_the_loss_or_its_gradient(fault) -> None:
    name, plant = FAULTS[fault]
    batch = draw_batch([30, 2, 60, 17], seed=3)
    expected, slopes = formula(CONFIGS[name], batch)
    with plant():
        total, gradient, _ = compute(CONFIGS[name], batch)
    effects = [abs(float(total) / expected - 1), np.abs(gradient.numpy() - slopes).max() / np.abs(slopes).max()]
    print(f"{fault}: {max(effects):.3f}")
    assert max(effects) > LEAST_EFFECT


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_bounds_keep_infinite_ratios_and_weights_out_where_there_are_bounds(config) -> None:
    """Take a token that the old policy, or the engine, held for impossible."""
    batch = draw_batch([8, 8], seed=5)
    batch["advantages"] = batch["advantages"].abs()
    batch["engine"][3] = -math.inf
    total, gradient, _ = compute(config, batch)
    has_bound = config.importance_truncation is not None or config.reject_above is not None
    if has_bound:
        assert total.isfinite()
        assert gradient.isfinite().all()
    elif not config.importance_correction:
        assert total.isfinite()


def test_at_the_first_update_the_gradient_is_that_of_the_log_probs_times_the_advantages() -> None:
    batch = draw_batch([5, 9])
    batch["policy"] = batch["old"]
    _, gradient, statistics = compute(AlgorithmConfig(), batch)
    assert torch.equal(gradient, batch["advantages"] * (-1 / 14))
    assert statistics.sums["ratio"].item() == 14


def test_equal_advantages_of_zero_leave_only_divergence_and_entropy() -> None:
    for config in CONFIGS.values():
        batch = draw_batch([5, 9], seed=6)
        batch["advantages"] = torch.zeros(14, dtype=torch.float64)
        total, gradient, _ = compute(config, batch)
        if not config.kl_beta:
            assert not gradient.any()
            assert config.entropy_coef or total == 0


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(0, 1000))
def test_sums_over_responses_are_numpys(lengths, seed) -> None:
    batch = draw_batch(lengths, seed)
    sequences, values = Sequences(batch["sequences"], batch["lengths"], 200), batch["policy"]
    parts = np.split(values.numpy(), np.cumsum(lengths)[:-1])
    for found, expected in (
        (sequences.sum(values), [np.full(len(part), part.sum()) for part in parts]),
        (sequences.mean(values), [np.full(len(part), part.mean()) for part in parts]),
        (sequences.sum_from(values), [part[::-1].cumsum()[::-1] for part in parts]),
    ):
        assert near(found, np.concatenate(expected))


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, MAX_TOKENS), min_size=2, max_size=9), st.sampled_from(["batch", "global", "gdpo"]),
    st.integers(0, 10**6), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_the_deviation_is_taken_of_advantages_less_the_divergence_however_responses_are_packed(
    lengths, name, seed, num_parts, has_reference
) -> None:
    config = AlgorithmConfig(advantage=name, kl_beta=0.3 if has_reference else 0.0, kl_in="reward")
    batch = draw_batch(lengths, seed)
    squares_N, first = [], 0
    for length in lengths:
        part = slice(first, first + length)
        away = (batch["old"][part] - batch["reference"][part]).numpy()
        to_come = np.array([away[place:].sum() for place in range(length)])
        squares_N.append((batch["advantages"][part].numpy() - config.kl_beta * to_come) ** 2)
        first += length
    mean = np.mean([squares.mean() for squares in squares_N]) if name == "gdpo" else np.concatenate(squares_N).mean()
    sums = [compute(config, part)[2].sums for part in _divide(batch, num_parts)]
    assert advantages.compute_deviation(sums) == pytest.approx(np.sqrt(mean) + 1e-6, rel=1e-12)


def _divide(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Yield the responses of a batch in several micro-batches."""
    lengths = batch["lengths"].tolist()
    for numbers in filter(len, np.array_split(np.arange(len(lengths)), num_parts)):
        tokens = torch.isin(batch["sequences"], torch.from_numpy(numbers))
        part = {name: batch[name][tokens] for name in NAMES}
        yield part | {
            "sequences": batch["sequences"][tokens] - int(numbers[0]), "lengths": batch["lengths"][numbers]
        }  # fmt: skip


@pytest.mark.parametrize("name", ["batch", "global", "gdpo"])
def test_advantages_stay_small_where_all_rewards_of_an_update_are_equal(name) -> None:
    """Take equal rewards: their deviation alone would be 1e-6, and multiply the divergence's part by a million."""
    batch = draw_batch([3, 40, 7], seed=3)
    batch["policy"], batch["advantages"] = batch["old"], torch.zeros_like(batch["old"])
    config = AlgorithmConfig(advantage=name, loss="reinforce", kl_beta=1e-3, kl_in="reward", aggregation="constant")
    _, gradient, statistics = compute(config, batch)
    used = -gradient * 3 * MAX_TOKENS / advantages.compute_deviation([statistics.sums])
    assert 1 < used.abs().max() < np.sqrt(len(batch["old"]))
    without = compute(dataclasses.replace(config, kl_beta=0.0), batch)
    assert not (without[1] / advantages.compute_deviation([without[2].sums])).any()


def test_global_divides_by_the_deviation_from_the_baseline_so_that_equal_rewards_stay_small() -> None:
    batch = draw_batch([2, 3])
    batch["advantages"] = torch.full_like(batch["old"], 0.5)
    statistics = compute(AlgorithmConfig(advantage="global"), batch)[2]
    assert 0.5 / advantages.compute_deviation([statistics.sums]) == pytest.approx(1, rel=1e-5)


def test_a_loss_divided_at_the_end_is_that_of_divided_advantages() -> None:
    """Divide at the end, so that no group need wait for the others: a loss scales with its advantages."""
    batch = draw_batch([5, 9, 30], seed=7)
    divided = {**batch, "advantages": batch["advantages"] / 0.37}
    for name, config in CONFIGS.items():
        if config.kl_beta or config.entropy_coef:
            continue
        for ours, theirs in zip(compute(config, divided)[:2], compute(config, batch)[:2], strict=True):
            assert near(ours, theirs / 0.37), name


def _all_parts() -> Iterator[AlgorithmConfig]:
    for loss, estimator, level in itertools.product(LOSSES, reference.DIVERGENCES, objective.LEVELS):
        yield AlgorithmConfig(
            loss=loss, kl_beta=0.1, kl_estimator=estimator, importance_correction=True, correction_level=level,
            importance_truncation=1.1, **NARROW,
        )  # fmt: skip


def test_every_combination_of_parts_equals_its_formula() -> None:
    batch = draw_batch([12, 3, 25], seed=8)
    for config in _all_parts():
        total, gradient, _ = compute(config, batch)
        expected, slopes = formula(config, batch)
        assert near(total, expected), config
        assert near(gradient, slopes), config
