"""Turn-level credit, against its definition in float64 and in the gradient of the loss."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.advantages import GroupAdvantages, compute_turn_advantages
from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.objective import Objective
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import ENVIRONMENT, divide_reward
from megatron_rl.sidecar.iteration import _part
from megatron_rl.trainer.data.batch import Batcher
from tests.unit.test_turns import respond

CONFIG = AlgorithmConfig(advantage="grpo", turn_credit=True)
PROMPT = wire.encode_tokens([7, 8])


def define(rewards: list[list[float]], conversation: int, turn: int) -> float:
    """Return a turn's advantage as docs/algorithms.md defines it."""
    returns = [math.fsum(of_turns[turn:]) for of_turns in rewards]
    mean = math.fsum(returns) / len(returns)
    variance = math.fsum((one - mean) ** 2 for one in returns) / len(returns)
    return (returns[conversation] - mean) / (math.sqrt(variance) + 1e-6)


GROUPS = st.lists(st.lists(st.floats(-4, 4), min_size=1, max_size=5), min_size=2, max_size=6)


@given(GROUPS)
def test_a_turn_is_compared_by_the_rewards_from_it_on_with_all_conversations_of_its_group(rewards) -> None:
    found = GroupAdvantages(CONFIG).compute_turns(part(rewards))
    assert [len(one) for one in found] == [len(one) for one in rewards]
    for conversation, of_turns in enumerate(found):
        for turn, value in enumerate(of_turns.tolist()):
            # A deviation that only rounding makes is divided by the 1e-6 alone.
            assert value == pytest.approx(define(rewards, conversation, turn), abs=1e-7)


def test_with_one_turn_each_it_is_the_advantage_of_the_rewards() -> None:
    (first, second, third) = compute_turn_advantages([[1.0], [4.0], [1.0]], lambda returns_K: returns_K * 2)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([2.0], [8.0], [2.0])
    alone = GroupAdvantages(CONFIG)(wire_part([1.0, 4.0, 1.0]))
    assert np.concatenate(GroupAdvantages(CONFIG).compute_turns(part([[1.0], [4.0], [1.0]]))) == pytest.approx(alone)


def test_what_no_turn_was_given_belongs_to_the_last_one() -> None:
    said = [("3", [1]), (ENVIRONMENT, [5]), ("3", [2]), (ENVIRONMENT, [6]), ("3", [3])]
    assert divide_reward(respond(*said, reward=2.0)) == [0.0, 0.0, 2.0]
    assert divide_reward(respond(*said, reward=2.0, turn_rewards=[0.5, -1.0, 0.25])) == [0.5, -1.0, 2.5]


def part(rewards: list[list[float]]) -> wire.GroupPart:
    return wire_part([math.fsum(one) for one in rewards], rewards)


def wire_part(rewards, turn_rewards=(), responses=(), first: int = 0) -> wire.GroupPart:
    return wire.GroupPart(
        prompt_index=0, row="rows:0", prompt_tokens=PROMPT, first_response=first, responses=list(responses),
        rewards=list(rewards), turn_rewards=list(turn_rewards),
    )  # fmt: skip


TALKS = [
    respond(("3", [10, 11]), (ENVIRONMENT, [50, 51, 52]), ("3", [12])),
    respond((ENVIRONMENT, [53]), ("3", [13, 14])),
    respond(("3", [15]), (ENVIRONMENT, [54]), ("3", [16, 17]), (ENVIRONMENT, [55]), ("3", [18])),
]
REWARDS = [[1.0, -1.0], [0.5], [0.0, 2.0, 1.0]]
# The turn of each target, by conversation.
TURNS = [(0, 0), (0, 0), (0, 1), (1, 0), (1, 0), (2, 0), (2, 1), (2, 1), (2, 2)]


def test_every_slot_of_a_group_has_the_rewards_of_all_its_turns() -> None:
    sums = [math.fsum(one) for one in REWARDS]
    given = [REWARDS[0], [], REWARDS[2]]
    responses = [
        msgspec.structs.replace(talk, reward=reward, turn_rewards=rewards)
        for talk, reward, rewards in zip(TALKS, sums, given, strict=True)
    ]
    group = wire.Group(prompt=wire.Prompt(index=0, row="rows:0", tokens=PROMPT), responses=responses)
    made = _part(group, first=1, size=1, has_turns=True)
    assert wire.decode(wire.encode(made), wire.GroupPart).turn_rewards == REWARDS
    assert made.responses == responses[1:2]
    assert _part(group, first=1, size=1, has_turns=False).turn_rewards == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_gradient_of_each_target_is_its_turns_advantage_also_where_a_group_is_split(is_shared: bool) -> None:
    advantages = GroupAdvantages(CONFIG)
    batcher = Batcher(advantages, advantages.compute_turns, is_shared=is_shared)
    sums = [math.fsum(one) for one in REWARDS]
    found: list[float] = []
    for first, last in ((0, 1), (1, 3)):
        one = wire_part(sums, REWARDS, TALKS[first:last], first)
        batch = batcher.batch(wire.Slot(run="r", version=3, fingerprint="f", replica=0, index=0, parts=[one]))
        policy_N = torch.zeros(batch.num_targets, requires_grad=True)
        roles = RoleLogProbs(policy_N, policy_N.detach())
        total, _ = Objective(CONFIG, 8).loss(
            roles, policy_N.detach(), batch.spread_advantages(), batch.pack.target_sequences_N, batch.lengths_S
        )
        total.backward()
        assert policy_N.grad is not None
        found += (-policy_N.grad).tolist()
    assert found == pytest.approx([define(REWARDS, *turn) for turn in TURNS], rel=1e-6)


def test_without_it_all_targets_of_a_response_have_its_advantage() -> None:
    sums = [math.fsum(one) for one in REWARDS]
    slot = wire.Slot(run="r", version=3, fingerprint="f", replica=0, index=0, parts=[wire_part(sums, REWARDS, TALKS)])
    batch = Batcher(GroupAdvantages(CONFIG)).batch(slot)
    of_response = GroupAdvantages(CONFIG)(slot.parts[0])
    expected = [of_response[conversation] for conversation, _ in TURNS]
    assert batch.spread_advantages().tolist() == pytest.approx(expected)
