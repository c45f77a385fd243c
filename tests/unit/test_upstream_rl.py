"""Our objective against Megatron-LM's own GRPO, on the same groups.

`MEGATRON_LM_TREES` names a source tree, or several with colons between them. Without one the tests are skipped:
megatron-core's wheels have no `megatron.rl`.
"""

import dataclasses
import itertools
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl.algorithm import advantages
from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.library import grpo
from megatron_rl.algorithm.library.grpo import normalize
from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs
from megatron_rl.shared.protocol import wire
from megatron_rl.trainer.data.batch import Batch, Batcher
from megatron_rl.trainer.mcore.step.forward_step import PolicyStep, RoleAssignment
from tests.grpo_twin import Group
from tests.truth import weighted_over_bound, worst_of
from tests.upstream_rl import EOD, Rules, Tensors, Upstream

TREES = [Path(tree) for tree in os.environ.get("MEGATRON_LM_TREES", "").split(os.pathsep) if tree]
VOCAB, HIDDEN, ROW_LENGTH, GROUP_SIZE = 13, 5, 16, 4
# The number that their advantages add to a group's deviation.
THEIR_EPSILON = 1e-4

CORRECTIONS = {
    "uncorrected": {},
    "corrected": {"is_corrected": True},
    "truncated": {"is_corrected": True, "truncation": 1.02},
}
# Their name for each of ours. Their mean of micro-batches' means is ours of responses if each has one row.
AGGREGATIONS = {
    "rows, per token": ("token", {"is_per_token": True}),
    "rows of four, per token": ("token", {"is_per_token": True, "micro_batch_size": 4}),
    "bins, per token": ("token", {"is_per_token": True, "is_packed": True}),
    "rows, mean of means": ("sequence", {}),
}


@pytest.fixture(params=TREES or [None], ids=lambda tree: tree.name if tree else "no tree")
def upstream(request: pytest.FixtureRequest) -> Upstream:
    if request.param is None:
        pytest.skip("make test-clones MEGATRON_LM_TREES=TREE runs it")
    return Upstream(request.param)


@pytest.fixture(scope="module")
def models() -> dict[str, Tensors]:
    """Build an old policy, and a policy and a reference that are some updates away from it."""
    chance = random.Random(3)

    def draw(size: int) -> torch.Tensor:
        return torch.tensor([[chance.gauss(0, 0.6) for _ in range(HIDDEN)] for _ in range(size)])

    old = {"embedding_VE": draw(VOCAB), "weight_VE": draw(VOCAB)}
    return {
        "old": old,
        "policy": {name: value + 0.15 * draw(VOCAB) for name, value in old.items()},
        "reference": {name: value + 0.2 * draw(VOCAB) for name, value in old.items()},
    }


@pytest.fixture(scope="module")
def groups(models: dict[str, Tensors]) -> list[Group]:
    """Build groups, of which one has equal rewards, and one a response that was cut off at the end of the row."""
    chance = random.Random(5)
    made = []
    for number in range(6):
        prompt = [chance.randrange(2, VOCAB) for _ in range(2 + number % 3)]
        lengths = [chance.randrange(0, 9) for _ in range(GROUP_SIZE)]
        responses = [[*(chance.randrange(2, VOCAB) for _ in range(length)), EOD] for length in lengths]
        if number == 1:
            responses[2] = [chance.randrange(2, VOCAB) for _ in range(ROW_LENGTH - len(prompt))]
        rewards = [0.5] * GROUP_SIZE if number == 2 else [chance.choice([0.0, 0.25, 1.0]) for _ in range(GROUP_SIZE)]
        made.append(Group(prompt, responses, rewards, [engine(models, prompt, one, chance) for one in responses]))
    return made


def engine(models: dict[str, Tensors], prompt: list[int], response: list[int], chance: random.Random) -> list[float]:
    """Draw log-probs near the old policy's, as float32 has them."""
    tokens = torch.tensor(prompt[-1:] + response)
    with torch.no_grad():
        exact = log_probs(models["old"], tokens[:-1], tokens[1:])
    return [float(np.float32(value + chance.gauss(0, 0.03))) for value in exact.tolist()]


def log_probs(model: Tensors, tokens_N: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Return the log-prob of each target, which depends on the token before it alone."""
    hidden_NE = model["embedding_VE"].index_select(0, tokens_N)
    return output_log_probs(hidden_NE, model["weight_VE"], targets_N, VocabularyShard(0, VOCAB))


def slots(groups: list[Group], is_divided: bool) -> Iterator[wire.Slot]:
    """Yield slots of two groups a micro-batch, or of a half of one."""
    size = GROUP_SIZE // 2 if is_divided else GROUP_SIZE
    parts = [
        wire.GroupPart(
            prompt_index=number, row="", prompt_tokens=wire.encode_tokens(group.prompt), first_response=first,
            rewards=group.rewards, responses=[response(group, one) for one in range(first, first + size)],
        )
        for number, group in enumerate(groups)
        for first in range(0, GROUP_SIZE, size)
    ]  # fmt: skip
    step = 1 if is_divided else 2
    for index, first in enumerate(range(0, len(parts), step)):
        chosen = parts[first : first + step]
        yield wire.Slot(run="run", version=0, fingerprint="", replica=0, index=index, parts=chosen)


def response(group: Group, number: int) -> wire.Response:
    return wire.Response(
        tokens=wire.encode_tokens(group.responses[number]), log_probs=wire.encode_log_probs(group.engine[number]),
        finish_reason="stop", seed=0, engine="", spans=[], fingerprint="", reward=group.rewards[number],
    )  # fmt: skip


def our_update(
    groups: list[Group], models: dict[str, Tensors], config: AlgorithmConfig, is_shared: bool, is_divided: bool
) -> tuple[float, Tensors]:
    """Return the loss of an update and its gradients: slots, batches, the last stage's loss_func, one division."""
    objective = Objective(config, ROW_LENGTH)
    batcher = Batcher(advantages.GroupAdvantages(AlgorithmConfig()), is_shared=is_shared)
    policy = {name: value.clone().requires_grad_() for name, value in models["policy"].items()}
    total = share = 0.0
    for slot in slots(groups, is_divided):
        batch: Batch = batcher.batch(slot)
        tokens_N = batch.pack.tokens_T.index_select(0, batch.pack.target_rows_N)
        with torch.no_grad():
            known = {
                role: {batch.index: log_probs(models[role], tokens_N, batch.pack.target_tokens_N)}
                for role in ("old", "reference")
            }
        assignment = RoleAssignment({role: role for role in known}, known=known)
        output_tensor = log_probs(policy, tokens_N, batch.pack.target_tokens_N)
        loss, _ = PolicyStep([], assignment, objective, 1.0, 1.0).loss_func(batch, {}, output_tensor)
        loss.backward()
        total += loss.item()
        share += objective.share(batch.num_targets, batch.num_responses)
    return total / share, {name: value.grad / share for name, value in policy.items()}


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_token_has_the_loss_and_gradient_of_megatron_lm(upstream, correction, beta):
    rules = Rules(**CORRECTIONS[correction])
    draw = torch.Generator().manual_seed(0)
    old, *noise = (torch.randn(4, 50, generator=draw, dtype=torch.float64) for _ in range(4))
    policy, reference, engine_log_probs = (old + 0.3 * values for values in noise)
    advantages_S = torch.randn(4, generator=draw, dtype=torch.float64)
    theirs, ours = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    losses, kl, ratios, _, above, below = upstream.functions.calculate_grpo_loss(
        theirs, old, reference, advantages_S, 0.2, 0.3, beta, 0.0,
        engine_log_probs if rules.is_corrected else None, rules.truncation,
    )  # fmt: skip
    config = AlgorithmConfig(
        clamp_eps_lower=0.2, clamp_eps_upper=0.3, kl_beta=beta, importance_correction=rules.is_corrected,
        importance_truncation=rules.truncation,
    )  # fmt: skip
    sequences_N = torch.arange(4).repeat_interleave(50)
    roles = RoleLogProbs(ours.flatten(), old.flatten(), {"reference": reference.flatten()})
    total, statistics = Objective(config, 50).loss(
        roles, engine_log_probs.flatten(), advantages_S[sequences_N], sequences_N, torch.full((4,), 50)
    )
    expected, found = (torch.autograd.grad(value, leaf)[0] for value, leaf in ((losses.sum(), theirs), (total, ours)))
    print(f"gradients differ by {(found - expected).abs().max():.1e}, the losses by {(total - losses.sum()).abs():.1e}")
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)
    assert abs(total - losses.sum()) < 1e-12
    sums = {name: float(value) for name, value in statistics.sums.items()}
    assert sums["ratio"] == pytest.approx(ratios.sum().item(), rel=1e-14)
    assert sums["kl"] == pytest.approx(kl.sum().item(), rel=1e-14)
    # They count each ratio beyond a bound, we those whose gradient is zero there.
    is_good = (advantages_S > 0)[:, None]
    assert (sums["clipped_high"], sums["clipped_low"]) == ((above & is_good).sum(), (below & ~is_good).sum())
    assert 0 < sums["clipped_high"] < above.sum()
    assert 0 < sums["clipped_low"] < below.sum()


def test_advantages_are_those_of_megatron_lm_but_for_the_constant_beside_the_deviation(upstream, groups):
    rewards = [group.rewards for group in groups]
    ours = np.concatenate([normalize(np.array(one)) for one in rewards])
    theirs = upstream.advantages(rewards)
    deviations = np.repeat([np.std(one) for one in rewards], GROUP_SIZE)
    factor = (deviations + THEIR_EPSILON) / (deviations + 1e-6)
    print(f"the largest difference is {np.abs(ours - theirs).max():.1e} of {np.abs(ours).max():.2f}")
    assert np.allclose(ours, theirs * factor, rtol=1e-12, atol=1e-12)
    assert np.abs(ours - theirs).max() > 1e-4


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("case", AGGREGATIONS)
def test_an_update_over_the_same_groups_is_that_of_megatron_rl(upstream, groups, models, case, correction, monkeypatch):
    monkeypatch.setattr(grpo, "EPSILON", THEIR_EPSILON)
    aggregation, words = AGGREGATIONS[case]
    rules = Rules(lower=0.1, upper=0.2, beta=0.05, **CORRECTIONS[correction], **words)
    config = AlgorithmConfig(
        clamp_eps_lower=0.1, clamp_eps_upper=0.2, kl_beta=0.05, aggregation=aggregation,
        importance_correction=rules.is_corrected, importance_truncation=rules.truncation,
    )  # fmt: skip
    theirs, truth = (
        upstream.update(groups, models, rules, ROW_LENGTH, dtype) for dtype in (torch.float32, torch.float64)
    )
    for is_shared, is_divided in itertools.product((True, False), repeat=2):
        loss, gradients = our_update(groups, models, config, is_shared, is_divided)
        error, name = worst_of(gradients, theirs.gradients, truth.gradients)
        of_loss = weighted_over_bound(loss, truth.loss, theirs.terms_N, truth.terms_N)
        differences = [(gradients[one] - truth.gradients[one]).abs().max().item() for one in gradients]
        print(
            f"{case}, {correction}: gradients within {max(differences):.1e} ({error:.2f} of the bound, {name}), "
            f"the loss within {abs(loss - truth.loss):.1e} ({of_loss:.2f}) of {truth.loss:.4f}"
        )
        assert max(error, of_loss) <= 1
        assert max(*differences, abs(loss - truth.loss)) < 1e-6


def test_without_the_loss_per_token_megatron_rls_loss_depends_on_the_micro_batches(upstream, groups, models):
    choices = [{"micro_batch_size": 1}, {"micro_batch_size": 2}, {"micro_batch_size": 4}, {"is_packed": True}]

    def losses(is_per_token: bool) -> list[float]:
        rules = [Rules(beta=0.05, is_per_token=is_per_token, **choice) for choice in choices]
        return [upstream.update(groups, models, each, ROW_LENGTH, torch.float64).loss for each in rules]

    per_token, means = losses(True), losses(False)
    print(f"per token {per_token}, means of means {means}")
    assert max(per_token) - min(per_token) < 1e-12
    assert min(abs(one - other) for one, other in itertools.combinations(means, 2)) > 1e-4


def test_a_missing_log_prob_of_the_engine_weighs_one_in_rows_and_its_token_down_in_bins(upstream, groups, models):
    shorter = [dataclasses.replace(group, engine=[one[:-1] for one in group.engine]) for group in groups]

    def effect(**changes: bool) -> float:
        rules = Rules(is_corrected=True, is_per_token=True, **changes)
        whole, less = (
            upstream.update(some, models, rules, ROW_LENGTH, torch.float64).loss for some in (groups, shorter)
        )
        return abs(whole - less)

    in_rows, in_bins = effect(), effect(is_packed=True)
    print(f"the loss changes by {in_rows:.1e} in rows, by {in_bins:.1e} in bins")
    assert in_bins > 3 * in_rows


def test_megatron_lms_entropy_term_of_a_token_is_not_the_entropy(upstream):
    """Take eight tokens of equal probability: the entropy is log 8, and each token's term is an eighth of it."""
    log_probs_BL = torch.full((1, 8), -math.log(8), dtype=torch.float64)
    *_, entropy_BL, _, _ = upstream.functions.calculate_grpo_loss(
        log_probs_BL, log_probs_BL, log_probs_BL, torch.ones(1), 0.2, 0.2, 0.0, 0.01
    )
    assert entropy_BL.mean().item() == pytest.approx(math.log(8) / 8)
    roles = RoleLogProbs(log_probs_BL[0], log_probs_BL[0])
    ones, zeros = torch.ones(8), torch.zeros(8, dtype=torch.int64)
    _, statistics = Objective(AlgorithmConfig(), 8).loss(roles, log_probs_BL[0], ones, zeros, torch.tensor([8]))
    assert statistics.sums["entropy"].item() / 8 == pytest.approx(math.log(8))
