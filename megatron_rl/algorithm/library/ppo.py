"""PPO: the clipped ratio that most algorithms here build upon, and advantages beyond a critic."""

import dataclasses
from typing import TYPE_CHECKING

from megatron_rl.algorithm.declaration import (
    Advantage,
    Algorithm,
    Loss,
    Paper,
    Preset,
    ScoredGroup,
    Surrogate,
    Targets,
)
from megatron_rl.flag import megatron_flag, own_flag

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclasses.dataclass(frozen=True)
class ClipSettings:
    """The bounds of ratios."""

    clamp_eps_lower: float = megatron_flag(
        0.2,
        "The distance below 1 up to which a ratio counts.",
        "--grpo-clamp-eps-lower",
        bound="between 0 and 1",
        remedy="write how far below 1 a ratio counts",
    )
    clamp_eps_upper: float = megatron_flag(
        0.2,
        "The distance above 1 up to which a ratio counts.",
        "--grpo-clamp-eps-upper",
        bound="at least 0",
        remedy="write how far above 1 a ratio counts",
    )
    dual_clip: float | None = own_flag(
        None,
        "The ratio above which a token of negative advantage is clipped too.",
        "--grpo-dual-clip",
        bound="above 1",
        remedy="the loss has a bound of its own below 1; write 3, for example",
    )

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest ratio that count."""
        return 1 - self.clamp_eps_lower, 1 + self.clamp_eps_upper


CLIP_READS = ("clamp_eps_lower", "clamp_eps_upper", "dual_clip")
CLIP = {"loss": "clip", "clamp_eps_lower": 0.2, "clamp_eps_upper": 0.2}
"""The settings of presets with PPO's loss and its usual bounds."""


def compute_clipped(ratio_N: "torch.Tensor", advantages_N: "torch.Tensor", settings: ClipSettings) -> Surrogate:
    """Compute -min(ratio A, clip(ratio) A), and bound it for bad tokens at `--grpo-dual-clip`."""
    lowest, highest = settings.ratio_bounds
    loss_N = -(ratio_N * advantages_N).minimum(ratio_N.clamp(lowest, highest) * advantages_N)
    is_low_N = (ratio_N < lowest) & (advantages_N < 0)
    is_high_N = (ratio_N > highest) & (advantages_N > 0)
    if settings.dual_clip is None:
        return Surrogate(loss_N, ratio_N, is_low_N, is_high_N)
    is_bad_N = advantages_N < 0
    loss_N = loss_N.minimum(-settings.dual_clip * advantages_N).where(is_bad_N, loss_N)
    return Surrogate(loss_N, ratio_N, is_low_N, is_high_N, is_bad_N & (ratio_N > settings.dual_clip))


def compute_loss(targets: Targets, settings: ClipSettings) -> Surrogate:
    """Compute the clipped loss of each token from its own ratio."""
    return compute_clipped(targets.ratio_N, targets.advantages_N, settings)


def keep_rewards(group: ScoredGroup, settings: ClipSettings) -> "np.ndarray":
    """Return the rewards, of which the critic makes advantages."""
    return group.rewards_K


PPO = Algorithm(
    Paper("PPO", "https://arxiv.org/abs/1707.06347"),
    losses=(Loss("clip", "-min(q A, clip(q) A)", compute_loss, reads=CLIP_READS),),
    advantages=(
        Advantage("gae", "the sum of r + g V' - V, by the critic's V", keep_rewards, compares=False, takes_critic=True),
    ),
    presets=(
        Preset("ppo", {**CLIP, "advantage": "gae", "aggregation": "token"}, remark="needs `--critic`"),
        Preset("ppo_clip", {**CLIP, "advantage": "mean", "aggregation": "token"}, remark="without its critic"),
    ),
)

VAPO = Algorithm(
    Paper("VAPO", "https://arxiv.org/abs/2504.05118"),
    presets=(
        Preset(
            "vapo",
            {
                "loss": "clip",
                "clamp_eps_lower": 0.2,
                "clamp_eps_upper": 0.28,
                "advantage": "gae",
                "critic_lambda": 1.0,
                "gae_length_alpha": 0.05,
                "aggregation": "token",
            },
            remark="its critic learns whole returns; needs `--critic`, and its warm-up helps",
        ),
    ),
)
