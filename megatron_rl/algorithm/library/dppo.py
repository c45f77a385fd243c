"""DPPO: a token loses its gradient by how far its probability has moved, not by the ratio of probabilities.

The ratio of a rare token leaves any bound by small steps, and the ratio of a frequent one hardly ever does. Here the
distance is the total variation between the two policies, if all tokens but the sampled one count as one ("binary").
"""

import dataclasses

from megatron_rl.algorithm.declaration import Algorithm, Loss, Paper, Surrogate, Targets
from megatron_rl.flag import own_flag


@dataclasses.dataclass(frozen=True)
class DppoSettings:
    """The size of the trust region."""

    dppo_divergence: float = own_flag(
        0.15,
        "With `--grpo-loss dppo`, the change of a token's probability above which it loses its gradient.",
        bound="above 0",
        remedy="write a change of a probability, such as 0.15",
    )


def compute_loss(targets: Targets, settings: DppoSettings) -> Surrogate:
    """Compute -M ratio A: M is 0 for tokens that the advantage would move further out of the region, else 1."""
    ratio_N, advantages_N = targets.ratio_N, targets.advantages_N
    moved_N = (targets.policy_N.exp() - targets.old_N.exp()).detach()
    is_low_N = (moved_N < -settings.dppo_divergence) & (advantages_N < 0)
    is_high_N = (moved_N > settings.dppo_divergence) & (advantages_N > 0)
    loss_N = (-ratio_N * advantages_N).masked_fill(is_low_N | is_high_N, 0.0)
    return Surrogate(loss_N, ratio_N, is_low_N, is_high_N)


DPPO = Algorithm(
    Paper("DPPO", "https://arxiv.org/abs/2602.04879"),
    losses=(
        Loss(
            "dppo",
            "-M q A, M held fixed",
            compute_loss,
            "M is 0 where p has left old p by more than `--dppo-divergence` in the direction of A, else 1; the binary "
            "total variation of the paper",
            ("dppo_divergence",),
        ),
    ),
)
