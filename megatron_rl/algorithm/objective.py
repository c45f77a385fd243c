"""What a micro-batch adds to the loss of its update, and the statistics that it reports.

Letters: N targets, S responses of the micro-batch.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron_rl.algorithm.losses import WEIGHTS, Clip, count_share, importance, k3
from megatron_rl.config.settings import AlgorithmConfig


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Scalars by name: sums, which are added up, and maxima, of which the largest counts."""

    sums: Mapping[str, torch.Tensor]
    maxima: Mapping[str, torch.Tensor]


def copy_to_host(many: Sequence[Statistics]) -> list[Statistics]:
    """Copy all numbers that are not there to the host at once: each copy by itself would wait for the device."""
    values = [value for one in many for value in (*one.sums.values(), *one.maxima.values())]
    away = [value.double() for value in values if value.device.type != "cpu"]
    copies = iter(torch.stack(away).cpu() if away else ())
    there = iter([value if value.device.type == "cpu" else next(copies) for value in values])
    return [
        Statistics({name: next(there) for name in one.sums}, {name: next(there) for name in one.maxima}) for one in many
    ]


def combine_statistics(many: Iterable[Statistics]) -> tuple[dict[str, float], dict[str, float]]:
    """Combine the sums and the maxima of all, in float64, in the order given."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for one in many:
        for name, value in one.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        for name, value in one.maxima.items():
            maxima[name] = _larger(maxima.get(name), float(value))
    return sums, maxima


def _larger(a: float | None, b: float) -> float:
    """NaN is the largest of all: Python's max would lose it."""
    if a is None or b != b:
        return b
    return a if a != a else max(a, b)


@dataclasses.dataclass(frozen=True)
class RoleLogProbs:
    """The log-probs of a micro-batch's targets under each role; the policy's have gradients."""

    policy_N: torch.Tensor
    old_N: torch.Tensor
    """Under the policy that sampled; if that is the policy itself, its own log-probs without gradients."""
    reference_N: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
    """GRPO, as the flags configure it."""

    config: AlgorithmConfig
    max_tokens: int
    """The most tokens of a response."""

    def share(self, num_targets: int, num_responses: int) -> int:
        """Return a micro-batch's share of the update's denominator."""
        return count_share(self.config.aggregation, num_targets, num_responses, self.max_tokens)

    def loss(
        self,
        log_probs: RoleLogProbs,
        engine_N: torch.Tensor,
        advantages_N: torch.Tensor,
        sequences_N: torch.Tensor,
        lengths_S: torch.Tensor,
    ) -> tuple[torch.Tensor, Statistics]:
        """Return the micro-batch's sum of losses, not yet divided by the update's denominator, and its statistics."""
        config, old_N = self.config, log_probs.old_N
        clip = Clip(config.clamp_eps_lower, config.clamp_eps_upper)
        ratio_N = (log_probs.policy_N - old_N).exp()
        loss_N = clip.loss(ratio_N, advantages_N)
        if config.importance_correction:
            loss_N = loss_N * importance(old_N, engine_N, config.importance_truncation)
        divergence_N = None
        if log_probs.reference_N is not None:
            divergence_N = k3(log_probs.policy_N, log_probs.reference_N)
            loss_N = loss_N + config.kl_beta * divergence_N
        weights_N = WEIGHTS[config.aggregation](sequences_N, lengths_S)
        total = (loss_N * weights_N).sum()
        with torch.no_grad():
            statistics = _measure(clip, total, ratio_N, advantages_N, old_N, old_N - engine_N, divergence_N)
        return total, statistics


def _measure(
    clip: Clip,
    total: torch.Tensor,
    ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_N: torch.Tensor,
    mismatch_N: torch.Tensor,
    divergence_N: torch.Tensor | None,
) -> Statistics:
    sums = {
        "loss": total.detach(),
        "targets": torch.tensor(float(len(ratio_N))),
        "ratio": ratio_N.sum(dtype=torch.float64),
        "clipped_low": clip.is_low(ratio_N, advantages_N).sum(),
        "clipped_high": clip.is_high(ratio_N, advantages_N).sum(),
        # The old policy sampled the tokens, so the mean of this estimates its entropy without bias.
        "entropy": -old_N.sum(dtype=torch.float64),
        "mismatch": mismatch_N.abs().sum(dtype=torch.float64),
        # On the engine's tokens: how far the trainer's policy is from the one that sampled them.
        "mismatch_kl": (mismatch_N.exp() - mismatch_N - 1).sum(dtype=torch.float64),
    }
    if divergence_N is not None:
        sums["kl"] = divergence_N.sum(dtype=torch.float64)
    maxima = {"mismatch": mismatch_N.abs().max() if len(mismatch_N) else mismatch_N.new_zeros(())}
    return Statistics(sums, maxima)
