"""The reference, which the policy is kept near to: `--grpo-kl-beta` times the divergence (KL) from it.

Letters: N targets.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.algorithm.declaration import LossRole, RoleLogProbs, Term
from megatron_rl.algorithm.sequences import Sequences


def _k2(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    return away_N.square() / 2


def _k3(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    return (-away_N).exp() + away_N - 1


def _k3_plus(away_N: torch.Tensor, ratio_N: torch.Tensor) -> torch.Tensor:
    squared_N = _k2(away_N, ratio_N)
    return _k3(away_N, ratio_N).detach() + squared_N - squared_N.detach()


DIVERGENCES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": lambda away_N, ratio_N: away_N,
    "k2": _k2,
    "k3": _k3,
    "k3+": _k3_plus,
    "unbiased": lambda away_N, ratio_N: ratio_N * _k3(away_N, ratio_N),
}
"""Estimates of KL(policy || reference) by the names of `--grpo-kl-estimator`, from d, the policy's log-prob less the
reference's, and the ratio of policy and old policy.

- `k1` is d: unbiased, of either sign. As a term of the loss its gradient has a mean of zero.
- `k2` is d^2 / 2: biased, never negative.
- `k3` is exp(-d) + d - 1: unbiased, never negative, but the mean of its gradient is not the divergence's.
- `k3+` has k3's value and k2's gradient. Where tokens are the policy's own, its mean is the divergence's gradient.
- `unbiased` is k3 times the ratio, and right in later updates too.
"""


def diverge(log_probs: RoleLogProbs, sequences: Sequences, config: Any) -> Term:
    """Compute the divergence of each target; in the reward, the policy that sampled the target diverges."""
    is_in_loss = config.kl_in == "loss"
    policy_N = log_probs.policy_N if is_in_loss else log_probs.old_N
    ratio_N = (policy_N - log_probs.old_N).exp()
    away_N = policy_N - log_probs.others[REFERENCE.name]
    divergence_N = DIVERGENCES[config.kl_estimator](away_N, ratio_N)
    sums = {"kl": divergence_N.detach().sum(dtype=torch.float64)}
    if is_in_loss:
        return Term(loss_N=config.kl_beta * divergence_N, sums=sums)
    return Term(advantages_N=-config.kl_beta * sequences.sum_from(divergence_N), sums=sums)


REFERENCE = LossRole("reference", is_used=lambda config: config.kl_beta > 0, compute=diverge)
