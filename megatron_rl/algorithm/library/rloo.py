"""RLOO: a plain policy gradient, and a response compared with the mean of the others (leave one out)."""

from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Loss, Paper, Preset, ScoredGroup, Surrogate, Targets
from megatron_rl.algorithm.library.grpo import subtract_mean

if TYPE_CHECKING:
    import numpy as np


def compute_advantages(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute r minus the mean of the group's other rewards."""
    count = len(group.rewards_K)
    return subtract_mean(group.rewards_K) * (count / (count - 1))


def compute_loss(targets: Targets, settings: Any) -> Surrogate:
    """Compute -A log-prob: no ratio, so it is on-policy only in the first update of an iteration."""
    return Surrogate(-targets.advantages_N * targets.policy_N, targets.ratio_N.detach())


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
    advantages=(Advantage("rloo", "r minus the mean of the group's other rewards", compute_advantages),),
    presets=(Preset("rloo", {"loss": "reinforce", "advantage": "rloo", "aggregation": "constant", "kl_in": "reward"}),),
)
