"""The advantages of a group, and the maxima of an update."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.library import ADVANTAGES
from megatron_rl.algorithm.objective import Statistics, combine_statistics
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.errors import InputError

SUMMED = sorted(
    name for name, advantage in ADVANTAGES.items() if not (advantage.takes_components or advantage.takes_critic)
)
NEAR = {"rtol": 1e-9, "atol": 1e-12}
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


def test_rewards_count_within_their_bounds() -> None:
    config = AlgorithmConfig(advantage="mean", reward_min=-1.0, reward_max=2.0)
    group = SimpleNamespace(rewards=[-5.0, 0.0, 1.0, 9.0], components={})
    assert np.allclose(GroupAdvantages(config)(group), [-1.5, -0.5, 0.5, 1.5], **NEAR)


def test_global_takes_off_the_mean_of_the_iteration_before_and_in_the_first_one_the_groups() -> None:
    of_global = GroupAdvantages(AlgorithmConfig(advantage="global", reward_max=4.0))
    groups = [SimpleNamespace(rewards=rewards, components={}) for rewards in ([0.0, 1.0, 9.0], [2.0, 2.0, 2.0])]
    assert np.allclose(of_global(groups[0]), np.array([0.0, 1.0, 4.0]) - 5 / 3, **NEAR)
    found = [of_global(group, 0.75) for group in groups]
    assert np.allclose(np.concatenate(found), np.array([0.0, 1.0, 4.0, 2.0, 2.0, 2.0]) - 0.75, **NEAR)


@given(
    st.lists(st.lists(st.none() | st.floats(-5, 5, width=32), min_size=4, max_size=4), min_size=1, max_size=3),
    st.lists(st.floats(-2, 2), min_size=3, max_size=3),
)
def test_each_reward_of_gdpo_counts_by_its_own_deviation(columns, weights) -> None:
    names = ["a", "b", "c"][: len(columns)]
    group = SimpleNamespace(rewards=[0.0] * 4, components=dict(zip(names, columns, strict=True)))
    by_name = dict(zip(names, weights, strict=False))
    expected = [0.0] * 4
    for name, column in group.components.items():
        given = [value for value in column if value is not None]
        for number, value in enumerate(column):
            # Of equal values none is better than another, whatever rounding makes of their mean.
            if value is not None and len(set(given)) > 1:
                mean = sum(given) / len(given)
                deviation = (sum((one - mean) ** 2 for one in given) / len(given)) ** 0.5
                expected[number] += by_name[name] * (value - mean) / (deviation + 1e-6)
    found = GroupAdvantages(AlgorithmConfig(advantage="gdpo"), by_name)(group)
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_gdpo_with_other_functions_than_the_sidecars_is_an_error() -> None:
    group = SimpleNamespace(rewards=[0.0, 1.0], components={"a": [0.0, 1.0]})
    with pytest.raises(InputError, match="the sidecar's rewards are a, and --reward names b: give both the same"):
        GroupAdvantages(AlgorithmConfig(advantage="gdpo"), {"b": 1.0})(group)


def test_a_maximum_over_values_with_nan_is_nan():
    values = [float("nan"), 1.0, 3.0]
    many = [Statistics({}, {"mismatch": torch.tensor(value)}) for value in values]
    assert math.isnan(combine_statistics(many)[1]["mismatch"])
    assert math.isnan(combine_statistics(many[::-1])[1]["mismatch"])
    assert combine_statistics(many[1:])[1]["mismatch"] == 3.0
