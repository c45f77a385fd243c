"""The advantages of a group's responses, computed from its rewards as `--grpo-advantage` says."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from megatron_rl.algorithm.declaration import Advantage, ScoredGroup
from megatron_rl.algorithm.library.grpo import EPSILON
from megatron_rl.algorithm.plug_ins import find_advantage
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.errors import InputError


class RewardedGroup(Protocol):
    """A whole group's rewards: the weighted sums, and each function's values; None where it does not apply."""

    @property
    def rewards(self) -> Sequence[float]: ...

    @property
    def components(self) -> Mapping[str, Sequence[float | None]]: ...


class ConversedGroup(Protocol):
    """The rewards of the turns of a whole group's conversations."""

    @property
    def turn_rewards(self) -> Sequence[Sequence[float]]: ...


class GroupAdvantages:
    """The advantages that the flags ask for, from the rewards of a whole group, in float64."""

    def __init__(self, config: AlgorithmConfig, weights: Mapping[str, float] | None = None) -> None:
        """`weights` belong to the reward functions; an advantage that takes these one by one needs them."""
        self._config = config
        self._weights = weights or {}

    @functools.cached_property
    def _advantage(self) -> Advantage:
        return find_advantage(self._config.advantage)

    @property
    def has_baseline(self) -> bool:
        """Return whether the mean reward of an iteration is used in the next."""
        return self._advantage.takes_baseline

    @property
    def takes_critic(self) -> bool:
        """Return whether these are rewards, of which a critic makes advantages."""
        return self._advantage.takes_critic

    @property
    def is_divided(self) -> bool:
        """Return whether their deviation over the update divides the whole loss, once all its groups have arrived."""
        return self._advantage.divided_over is not None

    def __call__(self, group: RewardedGroup, baseline: float | None = None) -> np.ndarray:
        """Compute the advantages of a group. `baseline` is the mean reward of the iteration before, for `global`.

        Without one, as in the first iteration, `global` takes off the group's own mean.
        """
        rewards_K = np.asarray(group.rewards, dtype=np.float64)
        bounded_K = np.clip(rewards_K, self._config.reward_min, self._config.reward_max)
        scored = ScoredGroup(bounded_K, self._read_components(group), self._weights, baseline)
        return self._advantage.compute(scored, self._config)

    def compute_turns(self, group: ConversedGroup) -> list[np.ndarray]:
        """Compute the advantages of the turns of a group's conversations."""

        def compute(returns_K: np.ndarray) -> np.ndarray:
            bounded_K = np.clip(returns_K, self._config.reward_min, self._config.reward_max)
            return self._advantage.compute(ScoredGroup(bounded_K, {}, self._weights, None), self._config)

        return compute_turn_advantages(group.turn_rewards, compute)

    def _read_components(self, group: RewardedGroup) -> dict[str, np.ndarray]:
        if self._advantage.takes_components and group.components.keys() != self._weights.keys():
            raise InputError(
                f"the sidecar's rewards are {', '.join(group.components) or 'none'}, and --reward names "
                f"{', '.join(self._weights) or 'none'}: give both the same functions, whose weights --grpo-advantage "
                f"{self._config.advantage} takes"
            )
        return {name: np.asarray(values_K, dtype=np.float64) for name, values_K in group.components.items()}


def compute_deviation(of_replicas: Iterable[Mapping[str, float]]) -> float:
    """Compute the number that divides the advantages of an update, from the statistics of all its parts.

    It is the deviation from the number that was taken off. From the advantages' own mean it would be 0 where all
    rewards are equal and the mean of the iteration before is another one: the update would be a million times as large.
    """
    squares, counts = zip(*((sums["advantage.squares"], sums["advantage.count"]) for sums in of_replicas), strict=True)
    return math.sqrt(math.fsum(squares) / math.fsum(counts)) + EPSILON


def is_all_equal(rewards_K: np.ndarray) -> bool:
    """Check whether all rewards are equal, so that no response is better than another of its group."""
    return bool((rewards_K == rewards_K[0]).all())


def compute_turn_advantages(
    rewards: Sequence[Sequence[float]], advantage: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Compute the advantages of each conversation's turns: each turn has the advantage of the rewards from it on.

    Every turn is compared with all conversations of the group: one that is over gets nothing more. With K conversations
    of a group, r_ij the reward of turn j of conversation i and T_i its turns:

        G_ik = r_ik + r_i,k+1 + ... + r_i,T_i, and 0 if the conversation was over before turn k
        A_ik = the advantage of G_ik among G_1k, ..., G_Kk, as --grpo-advantage computes it of rewards
    """
    returns_KT = np.zeros((len(rewards), max(map(len, rewards))), dtype=np.float64)
    for number, of_turns in enumerate(rewards):
        returns_KT[number, : len(of_turns)] = np.cumsum(np.asarray(of_turns, dtype=np.float64)[::-1])[::-1]
    advantages_KT = np.stack([advantage(returns_K) for returns_K in returns_KT.T], axis=1)
    return [advantages_T[: len(of_turns)] for advantages_T, of_turns in zip(advantages_KT, rewards, strict=True)]
