"""CISPO: the ratio is a bounded weight of the log-prob, so no token loses its gradient."""

from megatron_rl.algorithm.declaration import Algorithm, Loss, Paper, Preset, Surrogate, Targets
from megatron_rl.algorithm.library.ppo import ClipSettings


def compute_loss(targets: Targets, settings: ClipSettings) -> Surrogate:
    """Compute -clip(ratio) A log-prob, with the weight held fixed."""
    ratio_N = targets.ratio_N.detach()
    lowest, highest = settings.ratio_bounds
    loss_N = -ratio_N.clamp(lowest, highest) * targets.advantages_N * targets.policy_N
    return Surrogate(loss_N, ratio_N, ratio_N < lowest, ratio_N > highest)


CISPO = Algorithm(
    Paper("MiniMax-M1", "https://arxiv.org/abs/2506.13585"),
    losses=(
        Loss(
            "cispo",
            "-clip(q) A log p, clip(q) held fixed",
            compute_loss,
            "no token loses its gradient",
            ("clamp_eps_lower", "clamp_eps_upper"),
        ),
    ),
    presets=(
        Preset(
            "cispo",
            {
                "loss": "cispo",
                "clamp_eps_lower": 1.0,
                "clamp_eps_upper": 4.0,
                "advantage": "grpo",
                "aggregation": "token",
            },
            remark="bounds of [ScaleRL](https://arxiv.org/abs/2510.13786)",
        ),
    ),
)
