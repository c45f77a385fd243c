"""How much better than its group each response is. Registered by the names of `--grpo-advantage`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from megatron_rl.config.settings import AlgorithmConfig
from megatron_rl.errors import InputError

# Keeps a group whose deviation is zero from dividing by zero; the value that GRPO's authors chose.
_EPSILON = 1e-6


class Rewarded(Protocol):
    """A whole group's rewards: their weighted sum, and what each function gave; None where one does not apply."""

    @property
    def rewards(self) -> Sequence[float]: ...

    @property
    def components(self) -> Mapping[str, Sequence[float | None]]: ...


Advantage = Callable[[Rewarded], np.ndarray]
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


def gdpo(components: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Each reward's own `grpo`, weighted and added up; NaN is where a function does not apply, and adds nothing."""
    (count,) = {len(values_K) for values_K in components.values()}
    total_K = np.zeros(count)
    for name, values_K in components.items():
        applies_K = ~np.isnan(values_K)
        if applies_K.any():
            total_K[applies_K] += weights[name] * grpo(values_K[applies_K])
    return total_K


class GroupAdvantages:
    """The advantages that the flags ask for, from the rewards of a whole group, in float64."""

    def __init__(self, config: AlgorithmConfig, weights: Mapping[str, float] | None = None) -> None:
        """`weights` are those of the reward functions, which `gdpo` needs."""
        self._config = config
        self._weights = weights or {}

    @property
    def has_baseline(self) -> bool:
        """Whether the mean reward of an iteration is used in the next."""
        return self._config.advantage == "global"

    @property
    def is_divided(self) -> bool:
        """Return whether their deviation over the update divides the whole loss, once all its groups have arrived."""
        return self._config.advantage in DIVIDED

    def __call__(self, group: Rewarded, baseline: float | None = None) -> np.ndarray:
        """Compute the advantages of a group. `baseline` is the mean reward of the iteration before, for `global`.

        Without one, as in the first iteration, `global` takes off the group's own mean.
        """
        if self._config.advantage == "gdpo":
            return gdpo(_read_components(group, self._weights), self._weights)
        rewards_K = bound(np.asarray(group.rewards, dtype=np.float64), self._config)
        if self._config.advantage == "global" and baseline is not None:
            return rewards_K - baseline
        return ADVANTAGES[self._config.advantage](rewards_K)


def of_sums(function: Callable[[np.ndarray], np.ndarray]) -> Advantage:
    """Advantages that follow from the weighted sums alone."""
    return lambda group: function(np.asarray(group.rewards, dtype=np.float64))


def _read_components(group: Rewarded, weights: Mapping[str, float]) -> dict[str, np.ndarray]:
    if group.components.keys() != weights.keys():
        raise InputError(
            f"the sidecar's rewards are {', '.join(group.components) or 'none'}, and --reward names "
            f"{', '.join(weights) or 'none'}: give both the same functions, whose weights --grpo-advantage gdpo takes"
        )
    return {name: np.asarray(values_K, dtype=np.float64) for name, values_K in group.components.items()}


def compute_deviation(of_replicas: Iterable[Mapping[str, float]]) -> float:
    """Compute, from the statistics of all parts of an update, what the advantages of `DIVIDED` are divided by.

    It is the deviation from what was taken off. From the advantages' own mean it would be 0 where all rewards are equal
    and the mean of the iteration before is another one: the update would be a million times as large.
    """
    squares, counts = zip(*((sums["advantage.squares"], sums["advantage.count"]) for sums in of_replicas), strict=True)
    return math.sqrt(math.fsum(squares) / math.fsum(counts)) + _EPSILON


def is_all_equal(rewards_K: np.ndarray) -> bool:
    """Check whether all rewards are equal, so that no response is better than another of its group."""
    return bool((rewards_K == rewards_K[0]).all())


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": grpo,
    "mean": mean,
    "rloo": rloo,
    "batch": mean,
    "global": mean,
}
DIVIDED: Mapping[str, str] = {"batch": "token", "global": "token", "gdpo": "sequence"}
"""Their deviation over the update is known once all its groups have arrived. It divides the whole loss, at the end.

By name, what counts once in the deviation: as in the papers each token, or each response. As in `--grpo-aggregation`.
"""
