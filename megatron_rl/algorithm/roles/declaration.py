"""The object that a role is. Letters: N targets."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron_rl.algorithm.sequences import Sequences

POLICY, OLD = "policy", "old"
"""The names of the policy, and of the policy that sampled."""


@dataclasses.dataclass(frozen=True)
class RoleLogProbs:
    """The log-probs of a micro-batch's targets under each role; the policy's have gradients."""

    policy_N: torch.Tensor
    old_N: torch.Tensor
    """Log-probs under the policy that sampled; if it is the policy itself, the policy's own, without gradients."""
    others: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Log-probs under the other roles, by their names."""
    entropies_N: torch.Tensor | None = None
    """The entropies of the policy's distributions, with gradients."""


@dataclasses.dataclass(frozen=True)
class Term:
    """The part of a role in a micro-batch's loss."""

    advantages_N: torch.Tensor | None = None
    """What is added to each target's advantage."""
    loss_N: torch.Tensor | None = None
    """What is added to each target's loss."""
    sums: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Sums over the targets, of which metrics are means."""


@dataclasses.dataclass(frozen=True)
class Role:
    """A role of models that are not trained."""

    name: str
    """Its name in metrics, traces and checkpoints."""
    is_used: Callable[[Any], bool]
    """Checks whether a run with these settings (an AlgorithmConfig) has the role."""
    compute: Callable[[RoleLogProbs, Sequences, Any], Term]
    """Computes the role's part in the loss from log-probs and the settings."""
