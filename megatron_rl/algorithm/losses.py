"""The losses of tokens: PPO's clipped surrogate, the engine's correction, the divergence from a reference.

Letters: N targets.
"""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Clip:
    """How far the ratio of policy to old policy counts."""

    lower: float
    upper: float

    def loss(self, ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
        """-min(ratio * A, clip(ratio) * A)."""
        clipped_N = ratio_N.clamp(1 - self.lower, 1 + self.upper)
        return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)

    def is_low(self, ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
        """Where clipping from below ends the gradient: bad tokens that have become unlikely enough."""
        return (ratio_N < 1 - self.lower) & (advantages_N < 0)

    def is_high(self, ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
        """Where clipping from above ends the gradient: good tokens that have become likely enough."""
        return (ratio_N > 1 + self.upper) & (advantages_N > 0)


def importance(trainer_N: torch.Tensor, engine_N: torch.Tensor, truncation: float | None) -> torch.Tensor:
    """The trainer's probability of each token over the engine's, both of the version that sampled, truncated."""
    weight_N = (trainer_N - engine_N).exp()
    return weight_N if truncation is None else weight_N.clamp(max=truncation)


def k3(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Schulman's third estimator of KL(policy || reference), of log-probs: unbiased, never negative."""
    difference_N = reference_N - policy_N
    return difference_N.exp() - difference_N - 1
