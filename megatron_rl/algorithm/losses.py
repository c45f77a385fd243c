"""The losses of tokens: PPO's clipped surrogate, the engine's correction, the divergence from a reference; their sum.

How tokens add up to the loss of an update is registered by the names of `--grpo-aggregation`. A micro-batch gives a sum
and its share of a denominator. The update's denominator is the sum of these shares over all micro-batches of all
replicas, and divides once, at the end. So nothing depends on how responses are packed.

Letters: N targets, S responses of the micro-batch.
"""

import dataclasses
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Clip:
    """The range outside which the ratio of policy to old policy is clipped."""

    lower: float
    upper: float

    def loss(self, ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
        """-min(ratio * A, clip(ratio) * A)."""
        clipped_N = ratio_N.clamp(1 - self.lower, 1 + self.upper)
        return -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)

    def is_low(self, ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
        """Where clipping from below stops the gradient: bad tokens that have become unlikely enough."""
        return (ratio_N < 1 - self.lower) & (advantages_N < 0)

    def is_high(self, ratio_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
        """Where clipping from above stops the gradient: good tokens that have become likely enough."""
        return (ratio_N > 1 + self.upper) & (advantages_N > 0)


def importance(old_N: torch.Tensor, engine_N: torch.Tensor, truncation: float | None) -> torch.Tensor:
    """The trainer's probability of each token over the engine's, both of the version that sampled it; truncated."""
    weight_N = (old_N - engine_N).exp()
    return weight_N if truncation is None else weight_N.clamp(max=truncation)


def k3(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Schulman's third estimator of KL(policy || reference), from log-probs: unbiased, never negative."""
    difference_N = reference_N - policy_N
    return difference_N.exp() - difference_N - 1


Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the response of each target and the responses' lengths to each target's weight in the sum."""


def _weigh_alike(sequences_N: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(sequences_N), device=sequences_N.device)


def _weigh_by_length(sequences_N: torch.Tensor, lengths_S: torch.Tensor) -> torch.Tensor:
    # index_select: its result does not depend on the number of threads.
    return (1.0 / lengths_S.clamp(min=1)).float().index_select(0, sequences_N)


WEIGHTS: dict[str, Weigh] = {"token": _weigh_alike, "sequence": _weigh_by_length, "constant": _weigh_alike}


def count_share(aggregation: str, num_targets: int, num_responses: int, max_tokens: int) -> int:
    """A micro-batch's share of the denominator; whole numbers, so that their sum is exact."""
    return {"token": num_targets, "sequence": num_responses, "constant": num_responses * max_tokens}[aggregation]
