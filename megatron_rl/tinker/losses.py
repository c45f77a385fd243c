"""The losses of Tinker's interface: sums over the targets, of the same functions as those of runs.

The policy that sampled is the one of the datum's `logprobs`. Bounds are ratios, not distances from 1.

Letters: N targets.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from megatron_rl.algorithm.declaration import Targets
from megatron_rl.algorithm.library import cispo, reinforce
from megatron_rl.algorithm.library.ppo import ClipSettings, compute_clipped

WEIGHTS, LOG_PROBS, ADVANTAGES, SEQUENCE_MASK = "weights", "logprobs", "advantages", "sequence_ratio_mask"


@dataclasses.dataclass(frozen=True)
class Bounds(ClipSettings):
    """The settings that losses read."""

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 0.0
    beta: float = 0.05

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        return self.clip_low_threshold, self.clip_high_threshold


def _weigh_ratio(targets: Targets, settings: Bounds) -> torch.Tensor:
    """Compute -q A, with the whole gradient of the ratio."""
    return -targets.ratio_N * targets.advantages_N


def _weigh_sequence_ratio(targets: Targets, settings: Bounds) -> torch.Tensor:
    """Compute PPO's loss from the geometric mean of the ratios of a sequence's masked tokens."""
    sequences, mask_N = targets.sequences, targets.others[SEQUENCE_MASK]
    log_ratio_N = (targets.policy_N - targets.old_N).detach() * mask_N
    mean_N = sequences.sum(log_ratio_N) / sequences.sum(mask_N).clamp(min=1)
    ratio_N = mean_N.exp() * (targets.policy_N - targets.policy_N.detach()).exp()
    return compute_clipped(ratio_N, targets.advantages_N, settings).loss_N


def _regularize(targets: Targets, settings: Bounds) -> torch.Tensor:
    """Compute DRO's loss, -(A log p - beta / 2 (log q)^2)."""
    distance_N = targets.policy_N - targets.old_N
    return settings.beta / 2 * distance_N.square() - targets.advantages_N * targets.policy_N


@dataclasses.dataclass(frozen=True)
class ServedLoss:
    """A loss by its name in the interface."""

    compute: Callable[[Targets, Bounds], torch.Tensor]
    """Computes the losses of targets, of which `advantages_N` are the weights of `cross_entropy`."""
    inputs: tuple[str, ...] = (LOG_PROBS, ADVANTAGES)
    settings: tuple[str, ...] = ()
    is_weighed: bool = True
    """Whether a target of weight or advantage 0 has no gradient."""
    bounds: tuple[float, float] = (0.8, 1.2)


_CLIP = ("clip_low_threshold", "clip_high_threshold")
LOSSES: Mapping[str, ServedLoss] = {
    "cross_entropy": ServedLoss(lambda t, s: reinforce.compute_loss(t, s).loss_N, (WEIGHTS,)),
    "importance_sampling": ServedLoss(_weigh_ratio),
    "ppo": ServedLoss(lambda t, s: compute_clipped(t.ratio_N, t.advantages_N, s).loss_N, settings=_CLIP),
    "cispo": ServedLoss(lambda t, s: cispo.compute_loss(t, s).loss_N, settings=_CLIP, bounds=(0.0, 4.0)),
    "gspo": ServedLoss(_weigh_sequence_ratio, (LOG_PROBS, ADVANTAGES, SEQUENCE_MASK), settings=_CLIP),
    "dro": ServedLoss(_regularize, settings=("beta",), is_weighed=False),
}


def find_weight(loss: ServedLoss) -> str:
    """Return the input by which a loss weighs its targets."""
    return WEIGHTS if WEIGHTS in loss.inputs else ADVANTAGES


def find_settings(name: str, settings: Mapping[str, float]) -> Bounds:
    """Return a loss's settings, of which a request has some."""
    low, high = LOSSES[name].bounds
    return Bounds(**({"clip_low_threshold": low, "clip_high_threshold": high} | dict(settings)))
