"""How much better than its group each response is. Registered by the names of `--grpo-advantage`."""

import math
from collections.abc import Callable, Iterable

import numpy as np

from megatron_rl.config.settings import AlgorithmConfig

# Keeps a group whose deviation is zero from dividing by zero; the value that GRPO's authors chose.
_EPSILON = 1e-6

Advantage = Callable[[np.ndarray], np.ndarray]
"""From the rewards of a whole group to the advantages of its responses, in float64."""


def grpo(rewards_K: np.ndarray) -> np.ndarray:
    """(r - mean) / (std + 1e-6), with the population's deviation."""
    return mean(rewards_K) / (rewards_K.std() + _EPSILON)


def mean(rewards_K: np.ndarray) -> np.ndarray:
    """r - mean: not divided by the deviation, so hard prompts get no extra weight (Dr. GRPO). Equal rewards give 0."""
    if is_all_equal(rewards_K):
        return np.zeros_like(rewards_K)
    return rewards_K - rewards_K.mean()


def rloo(rewards_K: np.ndarray) -> np.ndarray:
    """r minus the mean of the group's other rewards (leave one out)."""
    count = len(rewards_K)
    return mean(rewards_K) * (count / (count - 1))


def bound(rewards_K: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Return rewards as they count, within the bounds that the flags give."""
    return np.clip(rewards_K, config.reward_min, config.reward_max)


def find_advantage(config: AlgorithmConfig) -> Advantage:
    """Find the advantages that the flags ask for."""
    return lambda rewards_K: ADVANTAGES[config.advantage](bound(rewards_K, config))


def spread(groups: Iterable[np.ndarray]) -> tuple[float, int]:
    """Return the sum of the squares of `mean`'s advantages of all responses of these groups, and their number."""
    advantages = [mean(rewards_K) for rewards_K in groups]
    return math.fsum(value * value for of_group in advantages for value in of_group), sum(map(len, advantages))


def deviation(parts: Iterable[tuple[float, int]]) -> float:
    """Return, from all parts of an update, what `batch` divides its advantages by."""
    squares, counts = zip(*parts, strict=True)
    return math.sqrt(math.fsum(squares) / sum(counts)) + _EPSILON


def is_all_equal(rewards_K: np.ndarray) -> bool:
    """Whether all rewards are equal: such a group teaches nothing, since every advantage is zero."""
    return bool((rewards_K == rewards_K[0]).all())


# What divides those of `batch` is known once all groups of an update are there. It divides the whole loss, at the end.
ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "mean": mean, "rloo": rloo, "batch": mean}
