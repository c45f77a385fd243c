"""How far the policy is from another one, estimated at tokens that were sampled.

Letters: N targets.
"""

import torch


def k3(policy_N: torch.Tensor, reference_N: torch.Tensor) -> torch.Tensor:
    """Schulman's third estimator of KL(policy || reference), of log-probs: unbiased, never negative."""
    difference_N = reference_N - policy_N
    return difference_N.exp() - difference_N - 1
