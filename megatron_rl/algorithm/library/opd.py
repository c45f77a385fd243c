"""On-policy distillation: a teacher grades each token that the policy samples, or the whole distribution it is from."""

from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Paper, Preset, ScoredGroup
from megatron_rl.algorithm.library.ppo import CLIP

if TYPE_CHECKING:
    import numpy as np


def compute_none(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Return zeros: rewards are measured, and do not count."""
    return 0.0 * group.rewards_K


OPD = Algorithm(
    Paper("On-policy distillation (GKD)", "https://arxiv.org/abs/2306.13649"),
    advantages=(
        Advantage("none", "0: rewards are measured, and other terms have the gradient", compute_none, compares=False),
    ),
    presets=(Preset("opd", {**CLIP, "advantage": "none", "aggregation": "token"}, "needs `--teacher`"),),
)
