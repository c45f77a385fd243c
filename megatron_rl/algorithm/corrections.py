"""Weights for tokens, since the engine's log-probs differ from the trainer's in the last bits.

A weight is the trainer's probability over the engine's, both under the version that sampled: of the token, of the whole
response, or the geometric mean over it. Outside its bounds it becomes the bound (truncate) or zero (mask). Besides, a
response is rejected if its geometric mean lies outside bounds of its own: none of its tokens counts.

Letters: N targets.
"""

import dataclasses
from collections.abc import Callable

import torch

from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.algorithm.settings import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class Correction:
    """The weights of targets, and which targets a bound changed or a rejection left out."""

    weight_N: torch.Tensor
    is_bounded_N: torch.Tensor
    is_rejected_N: torch.Tensor


LEVELS: dict[str, Callable[[Sequences, torch.Tensor], torch.Tensor]] = {
    "token": lambda sequences, log_N: log_N,
    "sequence": lambda sequences, log_N: sequences.sum(log_N),
    "geometric": lambda sequences, log_N: sequences.mean(log_N),
}


def correct(
    old_N: torch.Tensor, engine_N: torch.Tensor, sequences: Sequences, config: AlgorithmConfig
) -> Correction | None:
    """Return the weights that the flags ask for; None if they ask for none. Weights have no gradients."""
    is_rejecting = config.reject_below is not None or config.reject_above is not None
    if not config.importance_correction and not is_rejecting:
        return None
    log_N = old_N.detach() - engine_N
    weight_N, is_bounded_N = torch.ones_like(log_N), torch.zeros_like(log_N, dtype=torch.bool)
    is_rejected_N = is_bounded_N
    if config.importance_correction:
        lowest, highest = config.correction_lower, config.importance_truncation
        weight_N = LEVELS[config.correction_level](sequences, log_N).exp()
        is_bounded_N = _is_outside(weight_N, lowest, highest)
        if config.correction_mode == "mask":
            weight_N = weight_N.masked_fill(is_bounded_N, 0.0)
        elif lowest is not None or highest is not None:
            weight_N = weight_N.clamp(lowest, highest)
    if is_rejecting:
        is_rejected_N = _is_outside(sequences.mean(log_N).exp(), config.reject_below, config.reject_above)
        weight_N = weight_N.masked_fill(is_rejected_N, 0.0)
    return Correction(weight_N, is_bounded_N, is_rejected_N)


def _is_outside(value_N: torch.Tensor, lowest: float | None, highest: float | None) -> torch.Tensor:
    is_outside_N = torch.zeros_like(value_N, dtype=torch.bool)
    if lowest is not None:
        is_outside_N = is_outside_N | (value_N < lowest)
    if highest is not None:
        is_outside_N = is_outside_N | (value_N > highest)
    return is_outside_N
