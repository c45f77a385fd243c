"""GRPO, which compares a response with the other responses to its prompt, and what Dr. GRPO and DAPO change of it.

Dr. GRPO does not divide by a group's deviation, so hard prompts get no extra weight. DAPO has a higher bound for good
tokens, a mean over tokens, and groups without a signal replaced by others.
"""

from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Paper, Preset, ScoredGroup
from megatron_rl.algorithm.library.ppo import CLIP

if TYPE_CHECKING:
    import numpy as np

# Keeps a group whose deviation is zero from dividing by zero; the value that GRPO's authors chose.
EPSILON = 1e-6


def subtract_mean(rewards_K: "np.ndarray") -> "np.ndarray":
    """Subtract the mean; equal rewards give exactly 0, whatever rounding makes of their mean."""
    if (rewards_K == rewards_K[0]).all():
        return rewards_K - rewards_K
    return rewards_K - rewards_K.mean()


def normalize(rewards_K: "np.ndarray") -> "np.ndarray":
    """Subtract the mean, and divide by the population's deviation."""
    return subtract_mean(rewards_K) / (rewards_K.std() + EPSILON)


def compute_advantages(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute (r - mean) / (std + 1e-6)."""
    return normalize(group.rewards_K)


def compute_differences(group: ScoredGroup, settings: Any) -> "np.ndarray":
    return subtract_mean(group.rewards_K)


GRPO = Algorithm(
    Paper("DeepSeekMath", "https://arxiv.org/abs/2402.03300"),
    advantages=(Advantage("grpo", "(r - mean) / (std + 1e-6), with the population's deviation", compute_advantages),),
    presets=(Preset("grpo", {**CLIP, "advantage": "grpo", "aggregation": "sequence"}),),
)

DR_GRPO = Algorithm(
    Paper("Dr. GRPO", "https://arxiv.org/abs/2503.20783"),
    advantages=(Advantage("mean", "r - mean", compute_differences),),
    presets=(Preset("dr_grpo", {**CLIP, "advantage": "mean", "aggregation": "constant"}),),
)

DAPO = Algorithm(
    Paper("DAPO", "https://arxiv.org/abs/2503.14476"),
    presets=(
        Preset(
            "dapo",
            {**CLIP, "clamp_eps_upper": 0.28, "advantage": "grpo", "aggregation": "token", "filter_groups": True},
        ),
    ),
)
