"""DAPO: a higher bound for good tokens, a mean over tokens, and groups without a signal replaced by others."""

from megatron_rl.algorithm.declaration import Algorithm, Paper, Preset
from megatron_rl.algorithm.library.ppo import CLIP

DAPO = Algorithm(
    Paper("DAPO", "https://arxiv.org/abs/2503.14476"),
    presets=(
        Preset(
            "dapo",
            {**CLIP, "clamp_eps_upper": 0.28, "advantage": "grpo", "aggregation": "token", "filter_groups": True},
        ),
    ),
)
