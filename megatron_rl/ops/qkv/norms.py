"""The norms of queries and keys, each over the dimensions of one head."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """The norms of queries and keys: x / sqrt(mean(x^2) + epsilon) times a weight that all heads share."""

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    epsilon: float
    is_zero_centered: bool = False
    """True if the weights are those less 1."""
