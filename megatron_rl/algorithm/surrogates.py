"""What an update makes small: a loss for each token, from its ratio and its advantage. By the names of --grpo-loss.

docs/algorithms.md has the formulas and their papers. The ratio is the policy's probability of a token over that of the
policy that sampled it; a strictly on-policy run has one update an iteration, and there every ratio is 1.

Letters: N targets.
"""

import dataclasses
from collections.abc import Callable

import torch

from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.config.settings import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class Targets:
    """What is known of a micro-batch's targets."""

    policy_N: torch.Tensor
    """Log-probs, with gradients."""
    old_N: torch.Tensor
    advantages_N: torch.Tensor
    sequences: Sequences

    @property
    def ratio_N(self) -> torch.Tensor:
        return (self.policy_N - self.old_N).exp()


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """The losses of targets, and where a bound ends their gradient."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor
    is_low_N: torch.Tensor | None = None
    """Bad tokens that have become unlikely enough."""
    is_high_N: torch.Tensor | None = None
    """Good tokens that have become likely enough; for CISPO, those whose weight is bounded."""
    is_dual_N: torch.Tensor | None = None
    """Bad tokens that have become much likelier."""


def clip(targets: Targets, config: AlgorithmConfig) -> Surrogate:
    """PPO's: -min(ratio * A, clip(ratio) * A)."""
    return _clip(targets.ratio_N, targets.advantages_N, config)


def gspo(targets: Targets, config: AlgorithmConfig) -> Surrogate:
    """PPO's with one ratio for a response: the geometric mean of its tokens' ratios."""
    with torch.no_grad():
        of_response_N = targets.sequences.mean(targets.policy_N - targets.old_N).exp()
    # The value is the response's ratio, the gradient that of the token's log-prob; over a response they add up to the
    # gradient of the response's ratio.
    ratio_N = of_response_N * (targets.policy_N - targets.policy_N.detach()).exp()
    return _clip(ratio_N, targets.advantages_N, config)


def cispo(targets: Targets, config: AlgorithmConfig) -> Surrogate:
    """-clip(ratio) * A * log-prob with the weight held fixed: no token loses its gradient."""
    ratio_N = targets.ratio_N.detach()
    lowest, highest = 1 - config.clamp_eps_lower, 1 + config.clamp_eps_upper
    loss_N = -ratio_N.clamp(lowest, highest) * targets.advantages_N * targets.policy_N
    return Surrogate(loss_N, ratio_N, ratio_N < lowest, ratio_N > highest)


def sapo(targets: Targets, config: AlgorithmConfig) -> Surrogate:
    """-4 / t * sigmoid(t * (ratio - 1)) * A: a soft gate in place of a clip; t depends on the advantage's sign."""
    ratio_N, advantages_N = targets.ratio_N, targets.advantages_N
    temperature_N = torch.where(
        advantages_N > 0,
        advantages_N.new_full((), config.sapo_temperature_pos),
        advantages_N.new_full((), config.sapo_temperature_neg),
    )
    gate_N = (temperature_N * (ratio_N - 1)).sigmoid() * 4 / temperature_N
    return Surrogate(-gate_N * advantages_N, ratio_N)


def reinforce(targets: Targets, config: AlgorithmConfig) -> Surrogate:
    """-A * log-prob: no ratio, so it is on-policy only in the first update of an iteration."""
    return Surrogate(-targets.advantages_N * targets.policy_N, targets.ratio_N.detach())


SURROGATES: dict[str, Callable[[Targets, AlgorithmConfig], Surrogate]] = {
    "clip": clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def _clip(ratio_N: torch.Tensor, advantages_N: torch.Tensor, config: AlgorithmConfig) -> Surrogate:
    lowest, highest = 1 - config.clamp_eps_lower, 1 + config.clamp_eps_upper
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(lowest, highest) * advantages_N)
    is_low_N = (ratio_N < lowest) & (advantages_N < 0)
    is_high_N = (ratio_N > highest) & (advantages_N > 0)
    if config.dual_clip is None:
        return Surrogate(loss_N, ratio_N, is_low_N, is_high_N)
    is_bad_N = advantages_N < 0
    loss_N = torch.where(is_bad_N, torch.minimum(loss_N, -config.dual_clip * advantages_N), loss_N)
    return Surrogate(loss_N, ratio_N, is_low_N, is_high_N, is_bad_N & (ratio_N > config.dual_clip))
