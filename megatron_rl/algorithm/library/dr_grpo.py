"""Dr. GRPO: not divided by the deviation of a group, so hard prompts get no extra weight."""

from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Paper, Preset, ScoredGroup
from megatron_rl.algorithm.library.grpo import subtract_mean
from megatron_rl.algorithm.library.ppo import CLIP

if TYPE_CHECKING:
    import numpy as np


def compute_advantages(group: ScoredGroup, settings: Any) -> "np.ndarray":
    return subtract_mean(group.rewards_K)


DR_GRPO = Algorithm(
    Paper("Dr. GRPO", "https://arxiv.org/abs/2503.20783"),
    advantages=(Advantage("mean", "r - mean", compute_advantages),),
    presets=(Preset("dr_grpo", {**CLIP, "advantage": "mean", "aggregation": "constant"}),),
)
