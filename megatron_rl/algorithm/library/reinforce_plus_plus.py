"""REINFORCE++: advantages divided by their deviation over the whole update."""

from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Paper, Preset, ScoredGroup
from megatron_rl.algorithm.library.grpo import subtract_mean
from megatron_rl.algorithm.library.ppo import CLIP

if TYPE_CHECKING:
    import numpy as np


def subtract_own_mean(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute r - mean; the deviation over the update divides at the end."""
    return subtract_mean(group.rewards_K)


def subtract_baseline(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute r minus the mean reward of the iteration before, or of the group in the first iteration."""
    if group.baseline is None:
        return subtract_mean(group.rewards_K)
    return group.rewards_K - group.baseline


REINFORCE_PLUS_PLUS = Algorithm(
    Paper("REINFORCE++", "https://arxiv.org/abs/2501.03262"),
    advantages=(
        Advantage(
            "batch",
            "a / (d + 1e-6), where a is r - mean, and d the deviation of a over all tokens of the update",
            subtract_own_mean,
            divided_over="token",
        ),
        Advantage(
            "global",
            "a / (d + 1e-6), where a is r - m, m the mean reward of the iteration before, and d the deviation of a "
            "over all tokens of the update",
            subtract_baseline,
            divided_over="token",
            takes_baseline=True,
        ),
    ),
    presets=(
        Preset(
            "reinforce_plus_plus_baseline", {**CLIP, "advantage": "batch", "aggregation": "token", "kl_in": "reward"}
        ),
        Preset("reinforce_plus_plus", {**CLIP, "advantage": "global", "aggregation": "token", "kl_in": "reward"}),
    ),
)
