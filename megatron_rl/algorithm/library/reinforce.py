"""REINFORCE with a baseline: RLOO compares a response with the mean of the others, which leaves itself out.

REINFORCE++ divides advantages by their deviation over the whole update.
"""

from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Loss, Paper, Preset, ScoredGroup, Surrogate, Targets
from megatron_rl.algorithm.library.grpo import subtract_mean
from megatron_rl.algorithm.library.ppo import CLIP

if TYPE_CHECKING:
    import numpy as np


def leave_one_out(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute r minus the mean of the group's other rewards."""
    count = len(group.rewards_K)
    return subtract_mean(group.rewards_K) * (count / (count - 1))


def compute_loss(targets: Targets, settings: Any) -> Surrogate:
    """Compute -A log-prob: no ratio, so it is on-policy only in the first update of an iteration."""
    return Surrogate(-targets.advantages_N * targets.policy_N, targets.ratio_N.detach())


def subtract_own_mean(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute r - mean; the deviation over the update divides at the end."""
    return subtract_mean(group.rewards_K)


def subtract_baseline(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute r minus the mean reward of the iteration before, or of the group in the first iteration."""
    if group.baseline is None:
        return subtract_mean(group.rewards_K)
    return group.rewards_K - group.baseline


RLOO = Algorithm(
    Paper("RLOO", "https://arxiv.org/abs/2402.14740"),
    losses=(
        Loss(
            "reinforce",
            "-A log p",
            compute_loss,
            "no ratio: in later updates of an iteration it is not what a policy gradient would be",
        ),
    ),
    advantages=(Advantage("rloo", "r minus the mean of the group's other rewards", leave_one_out),),
    presets=(Preset("rloo", {"loss": "reinforce", "advantage": "rloo", "aggregation": "constant", "kl_in": "reward"}),),
)

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
