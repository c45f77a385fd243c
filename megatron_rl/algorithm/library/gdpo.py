"""GDPO: each reward function is normalized by itself, so that different combinations of values stay apart."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Paper, Preset, ScoredGroup
from megatron_rl.algorithm.library.grpo import normalize
from megatron_rl.algorithm.library.ppo import CLIP

if TYPE_CHECKING:
    import numpy as np


def combine_components(components: "Mapping[str, np.ndarray]", weights: Mapping[str, float]) -> "np.ndarray":
    """Add up the weighted, normalized values of each function; a function adds nothing where it does not apply."""
    # Imported here: flags are derived from this file, and numpy takes a while to load.
    import numpy as np

    (count,) = {len(values_K) for values_K in components.values()}
    total_K = np.zeros(count)
    for name, values_K in components.items():
        applies_K = ~np.isnan(values_K)
        if applies_K.any():
            total_K[applies_K] += weights[name] * normalize(values_K[applies_K])
    return total_K


def compute_advantages(group: ScoredGroup, settings: Any) -> "np.ndarray":
    """Compute the weighted sum of the functions' own advantages; the deviation over the update divides at the end."""
    return combine_components(group.components, group.weights)


GDPO = Algorithm(
    Paper("GDPO", "https://arxiv.org/abs/2601.05242"),
    advantages=(
        Advantage(
            "gdpo",
            "a / (d + 1e-6), where a sums the weight times (r - mean) / (std + 1e-6) over the functions of `--reward`; "
            "d is the deviation of a over all responses of the update",
            compute_advantages,
            divided_over="sequence",
            takes_components=True,
        ),
    ),
    presets=(Preset("gdpo", {**CLIP, "advantage": "gdpo", "aggregation": "token"}),),
)
