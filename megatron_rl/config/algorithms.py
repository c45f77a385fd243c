"""What is called by a name, as values of AlgorithmConfig. docs/algorithms.md has the papers.

The weight of a divergence is not among them, nor are sizes: papers choose both for their models.
"""

from collections.abc import Mapping
from typing import Any

_CLIP = {"loss": "clip", "clamp_eps_lower": 0.2, "clamp_eps_upper": 0.2}

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {**_CLIP, "advantage": "grpo", "aggregation": "sequence"},
    "dr_grpo": {**_CLIP, "advantage": "mean", "aggregation": "constant"},
    "dapo": {
        **_CLIP,
        "clamp_eps_upper": 0.28,
        "advantage": "grpo",
        "aggregation": "token",
        "filter_groups": True,
    },
    "gspo": {
        "loss": "gspo",
        "clamp_eps_lower": 3e-4,
        "clamp_eps_upper": 4e-4,
        "advantage": "grpo",
        "aggregation": "sequence",
    },
    "rloo": {"loss": "reinforce", "advantage": "rloo", "aggregation": "constant", "kl_in": "reward"},
    "reinforce_plus_plus": {**_CLIP, "advantage": "global", "aggregation": "token", "kl_in": "reward"},
    "reinforce_plus_plus_baseline": {**_CLIP, "advantage": "batch", "aggregation": "token", "kl_in": "reward"},
    "gdpo": {**_CLIP, "advantage": "gdpo", "aggregation": "token"},
    "cispo": {
        "loss": "cispo",
        "clamp_eps_lower": 1.0,
        "clamp_eps_upper": 4.0,
        "advantage": "grpo",
        "aggregation": "token",
    },
    "sapo": {"loss": "sapo", "advantage": "grpo", "aggregation": "sequence"},
    "ppo_clip": {**_CLIP, "advantage": "mean", "aggregation": "token"},
}
