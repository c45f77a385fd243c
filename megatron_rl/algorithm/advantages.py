"""How much better than its group each response is. Registered by the names of `--grpo-advantage`."""

from collections.abc import Callable

import numpy as np

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


def is_all_equal(rewards_K: np.ndarray) -> bool:
    """Whether all rewards are equal: such a group teaches nothing, since every advantage is zero."""
    return bool((rewards_K == rewards_K[0]).all())


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "mean": mean, "rloo": rloo}
