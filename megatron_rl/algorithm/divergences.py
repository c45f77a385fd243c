"""Estimates of KL(policy || reference) from a token's two log-probs, by the names of `--grpo-kl-estimator`.

d is the policy's log-prob less the reference's. As a term of the loss, k1 has a gradient whose mean is zero, and the
mean of k3's gradient is not the divergence's. `k3+` has k3's value and k2's gradient; where tokens are the policy's
own, the mean of that gradient is the divergence's. `unbiased` is k3 times the ratio, and right in later updates too.

Letters: N targets.
"""

from collections.abc import Callable

import torch


def k1(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    """Estimate it as d: unbiased, of either sign."""
    return away_N


def k2(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    """Estimate it as d^2 / 2: biased, never negative."""
    return away_N.square() / 2


def k3(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    """Estimate it as exp(-d) + d - 1: unbiased, never negative."""
    return (-away_N).exp() + away_N - 1


def k3_plus(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    """Return k3's value with the gradient of k2."""
    squared_N = k2(away_N, ratio_N)
    return k3(away_N, ratio_N).detach() + squared_N - squared_N.detach()


def unbiased(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    """Return k3 times the ratio."""
    return ratio_N * k3(away_N, ratio_N)


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3+": k3_plus,
    "unbiased": unbiased,
}
