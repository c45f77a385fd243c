"""Responses that failed for reasons that are not the policy's: they have no part in their group, nor in the update."""

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.library import ADVANTAGES
from megatron_rl.algorithm.objective import count_share
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.confined.process import CallFailed, TooSlow
from megatron_rl.environments.types import NUM_REFILLS, OnError
from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import derive_refill_seed
from megatron_rl.shared.protocol.selection import has_signal
from megatron_rl.sidecar.group_maker import _add_reward, _drop_if_alone
from megatron_rl.sidecar.iteration import _part
from megatron_rl.trainer.data.batch import Batcher
from megatron_rl.trainer.loop.equal_rewards import Failures
from megatron_rl.trainer.loop.measures import summarize
from tests.unit.test_conversations import PROMPT, Engines, Pool, Talk, hold
from tests.unit.test_turns import describe, respond

MEAN = AlgorithmConfig(advantage="mean")


def make_group(rewards: list[float | None]) -> wire.Group:
    """Make a group in which the responses with the reward None failed; each has its own tokens."""
    responses = [
        respond(
            ("3", [10 + number, 11]),
            reward=reward,
            **(failed() if reward is None else {"components": {"exact": reward}}),
        )
        for number, reward in enumerate(rewards)
    ]
    return wire.Group(prompt=PROMPT, responses=responses)


def failed() -> dict[str, Any]:
    return {"cause": "raised", "finish_reason": "failed", "failure": "OSError: away"}


def slot(*parts: wire.GroupPart) -> wire.Slot:
    return wire.Slot(run="run", version=3, fingerprint="w", replica=0, index=0, parts=list(parts))


def test_the_mean_and_the_denominator_are_those_of_the_scored_responses() -> None:
    # NeMo-RL's table: of [1, 1, 0, 0] the second is masked.
    part = _part(make_group([1.0, None, 0.0, 0.0]), 0, 4, has_turns=False)
    batch = Batcher(GroupAdvantages(MEAN)).batch(slot(part))
    assert batch.advantages_S.tolist() == pytest.approx([0.667, -0.333, -0.333], abs=1e-3)
    assert (batch.num_responses, batch.num_targets) == (3, 6)
    assert [count_share(one, 6, 3, 40) for one in ("token", "sequence", "constant")] == [6, 3, 120]
    assert part.unscored == [wire.Unscored(cause="raised", failure="OSError: away")]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_with_a_failure_is_the_batch_of_the_group_without_it(name: str, size: int) -> None:
    # With every estimator, and for each way to split the group over slots.
    whole, without = make_group([1.0, None, 0.5, 0.0]), make_group([1.0, None, 0.5, 0.0])
    del without.responses[1]
    advantages = GroupAdvantages(AlgorithmConfig(advantage=name), {"exact": 1.0})
    parts = [_part(whole, first, size, has_turns=False) for first in range(0, 4, size)]
    reference = Batcher(advantages).batch(slot(_part(without, 0, 3, has_turns=False)))
    batches = [Batcher(advantages).batch(slot(part)) for part in parts]
    for field in ("engine_log_probs_N", "advantages_S", "lengths_S"):
        found = torch.cat([getattr(batch, field) for batch in batches])
        assert torch.equal(found, getattr(reference, field))
    targets = torch.cat([batch.pack.target_tokens_N for batch in batches])
    assert torch.equal(targets, reference.pack.target_tokens_N)
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    described = describe(*parts)
    assert described["groups"] == 1
    assert described["responses"]["failures"] == {"raised": 1}
    assert described["responses"]["unscored"] == 0.25
    assert described["reward"]["mean"] == 0.5


def test_failures_that_are_independent_of_the_reward_leave_the_expected_advantage_as_it_was() -> None:
    """Compute the expectation over all failures of 4 responses, exactly, and what zeros in their place make of it."""
    rewards, share = np.array([1.0, 1.0, 0.0, 1.0]), 0.15
    advantages = GroupAdvantages(AlgorithmConfig(advantage="rloo"))
    expected = np.zeros(4)
    with_zeros = np.zeros(4)
    weights = np.zeros(4)
    for kept in itertools.product([True, False], repeat=4):
        probability = float(np.prod([1 - share if one else share for one in kept]))
        zeroed = [reward if one else 0.0 for one, reward in zip(kept, rewards.tolist(), strict=True)]
        with_zeros += probability * advantages(_scored(zeroed)) * kept
        if sum(kept) < 2:
            continue
        group = _drop_if_alone(make_group([reward if one else None for one, reward in zip(kept, rewards, strict=True)]))
        found = advantages(_part(group, 0, 4, has_turns=False))
        places = np.flatnonzero(kept)
        expected[places] += probability * found
        weights[places] += probability
    whole = advantages(_scored(rewards.tolist()))
    assert expected / weights == pytest.approx(whole)
    # What remains of a group of which failures count as zeros looks better than it is.
    assert abs(with_zeros / (1 - share) - whole).max() > 0.1


def _scored(rewards: list[float]) -> wire.GroupPart:
    return _part(make_group([*rewards]), 0, len(rewards), has_turns=False)


def test_a_group_with_one_scored_response_is_dropped_and_a_group_of_one_is_not() -> None:
    dropped = _drop_if_alone(make_group([None, 1.0, None]))
    assert [one.reward for one in dropped.responses] == [None] * 3
    assert [one.cause for one in dropped.responses] == ["raised", "dropped", "raised"]
    for rewards in ([1.0], [1.0, 0.0, None], [None, None]):
        group = make_group([*rewards])
        assert _drop_if_alone(group) is group
    # A slot whose responses all failed has rows, no targets and no weight.
    batch = Batcher(GroupAdvantages(MEAN), multiple_of=4).batch(slot(_part(dropped, 0, 3, has_turns=False)))
    assert (batch.num_targets, batch.num_responses, batch.pack.num_tokens) == (0, 0, 4)
    part = _part(make_group([1.0, None, 0.0, None]), 0, 4, has_turns=False)
    metrics = describe(msgspec.structs.replace(part, turn_rewards=[[1.0], [0.0]]))["responses"]
    assert metrics | {"count": 2, "failed": 0.5, "unscored": 0.5, "failures": {"raised": 2}} == metrics
    assert metrics["failure"] == "rows:4: OSError: away"


def test_a_reward_that_an_environment_gave_stays_where_no_function_applies() -> None:
    acted = respond(("3", [1]), reward=0.5, components={"environment": 0.5})
    assert _add_reward(acted, None, {"exact": None}).reward == 0.5
    plain = _add_reward(respond(("3", [1])), None, {"exact": None})
    assert (plain.reward, plain.cause) == (None, "no reward")
    # What is not scored gives no signal.
    plan = wire.Plan(num_prompts=1, group_size=2, num_replicas=1, micro_batch_size=2, deciding_rewards=["exact"])
    pair = [msgspec.structs.replace(plain, components={"exact": value}) for value in (0.0, 1.0)]
    assert not has_signal(pair, plan)
    metrics = describe(_part(wire.Group(prompt=PROMPT, responses=[acted, plain]), 0, 2, has_turns=False))
    assert metrics["responses"] | {"failed": 0.0, "unscored": 0.5, "failures": {"no reward": 1}} == metrics["responses"]
    line = Failures("exclude").follow(metrics)
    assert line == "warning: every reward function returned None for 1 response, which are not trained on"


def test_an_evaluation_leaves_out_what_is_not_scored_and_a_source_without_a_score() -> None:
    groups = [
        wire.Group(prompt=msgspec.structs.replace(PROMPT, row=row), responses=make_group(rewards).responses)
        for row, rewards in (("a:1", [1.0, 0.0]), ("b:1", [None, None]), ("a:2", [None, 1.0]))
    ]
    evaluated = wire.Evaluated(run="run", version=3, fingerprint="w", groups=groups)
    found = summarize(evaluated, 1.0)
    assert (found["mean"], found["pass"], found["num_prompts"], found["unscored"]) == (pytest.approx(2 / 3), 1.0, 2, 3)
    with pytest.raises(MegatronRLError, match="no response of the evaluation is scored: OSError: away"):
        summarize(msgspec.structs.replace(evaluated, groups=groups[1:2]), 1.0)


def test_a_failed_conversation_is_left_out_or_sampled_again_with_seeds_that_follow_from_the_first() -> None:
    broken, whole = CallFailed("no such move"), [None]
    (response,) = hold(Engines(), Pool(Talk(None, ["20", broken])), OnError())
    assert (response.reward, response.cause, response.finish_reason) == (None, "raised", "failed")
    assert (response.failure, response.components) == ("no such move", {})
    # Nothing has been said.
    pool = Pool(Talk(None, [TooSlow("too slow")]), Talk(None, [broken]), Talk(None, whole))
    engines = Engines()
    (response,) = hold(engines, pool, OnError(num_refills=NUM_REFILLS))
    assert (response.reward, response.refilled) == (11.0, ("timeout", "raised"))
    assert response.seed == derive_refill_seed(100, 2) == pool.held[2][1]
    assert len({one.seed for one in engines.requests}) == len({one.request_id for one in engines.requests}) == 3
    # In vain.
    (response,) = hold(Engines(), Pool(*[Talk(None, [broken]) for _ in range(4)]), OnError(num_refills=NUM_REFILLS))
    assert (response.reward, response.refilled) == (None, ("raised",) * NUM_REFILLS)
    assert response.seed == derive_refill_seed(100, NUM_REFILLS)
