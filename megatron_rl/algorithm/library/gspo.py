"""GSPO: one ratio for a response, the geometric mean of its tokens' ratios."""

from megatron_rl.algorithm.declaration import Algorithm, Loss, Paper, Preset, Surrogate, Targets
from megatron_rl.algorithm.library.ppo import CLIP_READS, ClipSettings, compute_clipped


def compute_loss(targets: Targets, settings: ClipSettings) -> Surrogate:
    """Compute PPO's loss from the ratio of the response."""
    of_response_N = targets.sequences.mean((targets.policy_N - targets.old_N).detach()).exp()
    # The value is the response's ratio, the gradient that of the token's log-prob; over a response they add up to the
    # gradient of the response's ratio.
    ratio_N = of_response_N * (targets.policy_N - targets.policy_N.detach()).exp()
    return compute_clipped(ratio_N, targets.advantages_N, settings)


GSPO = Algorithm(
    Paper("GSPO", "https://arxiv.org/abs/2507.18071"),
    losses=(
        Loss(
            "gspo",
            "the same as `clip` with one q for a response, the geometric mean of its tokens'",
            compute_loss,
            "over a response, the gradient is that of GSPO and of its token variant, which differ only where tokens of "
            "a response have advantages of their own",
            CLIP_READS,
        ),
    ),
    presets=(
        Preset(
            "gspo",
            {
                "loss": "gspo",
                "clamp_eps_lower": 3e-4,
                "clamp_eps_upper": 4e-4,
                "advantage": "grpo",
                "aggregation": "sequence",
            },
        ),
    ),
)
