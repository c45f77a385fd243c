"""The part of a micro-batch in the loss of its update, and the statistics that it reports.

A micro-batch gives a sum and its share of a denominator. The update's denominator is the sum of these shares over all
micro-batches of all replicas, and divides once, at the end. So nothing depends on how responses are packed, but what
KTO compares pairs with: a mean over the micro-batch.

Letters: N targets, S responses of the micro-batch, P pairs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from megatron_rl.algorithm.declaration import (
    Advantage,
    Loss,
    LossRole,
    Pairs,
    Preference,
    RoleLogProbs,
    Surrogate,
    Targets,
)
from megatron_rl.algorithm.library import PREFERENCES
from megatron_rl.algorithm.library.dpo import PreferenceConfig
from megatron_rl.algorithm.plug_ins import Metric, find_advantage, find_loss, find_metrics, find_roles
from megatron_rl.algorithm.roles.reference import REFERENCE
from megatron_rl.algorithm.sequences import Sequences
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.types import Divergence


@dataclasses.dataclass(frozen=True)
class Correction:
    """Weights for tokens, since the engine's log-probs differ from the trainer's in the last bits.

    A weight is the trainer's probability over the engine's, both under the version that sampled: of the token, of the
    whole response, or the geometric mean over it. Outside its bounds it becomes the bound (truncate) or zero (mask).
    Besides, a response is rejected if its geometric mean is outside bounds of its own: none of its tokens counts.
    """

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


Weigh = Callable[[Sequences, torch.Tensor], torch.Tensor]
"""Turns the losses of targets into the terms of the micro-batch's sum."""


def _keep(sequences: Sequences, loss_N: torch.Tensor) -> torch.Tensor:
    return loss_N


WEIGHTS: dict[str, Weigh] = {"token": _keep, "sequence": Sequences.divide, "constant": _keep}
"""By the names of `--grpo-aggregation`."""


def count_share(aggregation: str, num_targets: int, num_responses: int, max_tokens: int) -> int:
    """Count a micro-batch's share of the denominator: whole numbers, so that their sum is exact."""
    return {"token": num_targets, "sequence": num_responses, "constant": num_responses * max_tokens}[aggregation]


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Scalars by name: sums, which are added up, and maxima, of which the largest counts."""

    sums: Mapping[str, torch.Tensor]
    maxima: Mapping[str, torch.Tensor]


def copy_to_host(many: Sequence[Statistics]) -> list[Statistics]:
    """Copy all numbers on devices to the host at once: single copies would each wait for the device."""
    values = [value for one in many for value in (*one.sums.values(), *one.maxima.values())]
    away = [value.double() for value in values if value.device.type != "cpu"]
    copies = iter(torch.stack(away).cpu() if away else ())
    on_host = iter([value if value.device.type == "cpu" else next(copies) for value in values])
    return [
        Statistics({name: next(on_host) for name in one.sums}, {name: next(on_host) for name in one.maxima})
        for one in many
    ]


def combine_statistics(many: Iterable[Statistics]) -> tuple[dict[str, float], dict[str, float]]:
    """Combine the sums and the maxima of all, in float64, in this order."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for one in many:
        for name, value in one.sums.items():
            sums[name] = sums.get(name, 0.0) + float(value)
        for name, value in one.maxima.items():
            maxima[name] = _larger(maxima.get(name), float(value))
    return sums, maxima


def _larger(a: float | None, b: float) -> float:
    """Return the larger number; NaN is the largest of all, and Python's max would lose it."""
    if a is None or b != b:
        return b
    return a if a != a else max(a, b)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss that the flags ask for."""

    config: AlgorithmConfig
    max_tokens: int
    """The most tokens that a response may have."""

    @functools.cached_property
    def divergences(self) -> dict[str, Divergence]:
        """The divergences from roles that give no log-probs, by the names of the roles."""
        of_roles = {
            name: role.find_divergence(self.config) for name, role in self._roles.items() if role.is_used(self.config)
        }
        return {name: divergence for name, divergence in of_roles.items() if divergence is not None}

    @property
    def takes_entropies(self) -> bool:
        """Check whether the loss needs the entropies of the policy's distributions."""
        return self.config.entropy_coef > 0

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
        sequences = Sequences(sequences_N, lengths_S, self.max_tokens)
        if self._advantage.takes_critic:
            log_probs = dataclasses.replace(log_probs, rewards_N=advantages_N)
            advantages_N = torch.zeros_like(advantages_N)
        terms = [
            role.compute(log_probs, sequences, config) for name, role in self._roles.items() if name in log_probs.others
        ]
        for term in terms:
            if term.advantages_N is not None:
                advantages_N = advantages_N + term.advantages_N
        targets = Targets(log_probs.policy_N, old_N, advantages_N, sequences, engine_N, log_probs.others)
        surrogate = self._loss.compute(targets, config)
        loss_N = surrogate.loss_N
        correction = correct(old_N, engine_N, sequences, config)
        if correction is not None:
            loss_N = loss_N * correction.weight_N
        for term in terms:
            if term.loss_N is not None:
                loss_N = loss_N + term.loss_N
        if log_probs.entropies_N is not None:
            loss_N = loss_N - config.entropy_coef * log_probs.entropies_N
        total = WEIGHTS[config.aggregation](sequences, loss_N).sum()
        with torch.no_grad():
            sums = _measure(surrogate, correction, old_N)
            for term in terms:
                sums |= term.sums
            if self._advantage.divided_over is not None:
                sums |= _spread(self._advantage.divided_over, advantages_N, sequences)
            if log_probs.entropies_N is not None:
                sums["entropy_policy"] = log_probs.entropies_N.sum(dtype=torch.float64)
            for metric in self._metrics:
                sums[f"metric.{metric.name}"] = metric.compute(targets, config).sum(dtype=torch.float64)
            mismatch_N = old_N - engine_N
            sums |= {
                "loss": total.detach(),
                "mismatch": mismatch_N.abs().sum(dtype=torch.float64),
                "mismatch_differing": (mismatch_N != 0).sum(dtype=torch.float64),
                # On the engine's tokens: how far the trainer's policy is from the one that sampled them.
                "mismatch_kl": (mismatch_N.exp() - mismatch_N - 1).sum(dtype=torch.float64),
            }
            maxima = {"mismatch": mismatch_N.abs().max() if len(mismatch_N) else mismatch_N.new_zeros(())}
        return total, Statistics(sums, maxima)

    @functools.cached_property
    def _roles(self) -> Mapping[str, LossRole]:
        return find_roles(self.config)

    @functools.cached_property
    def _loss(self) -> Loss:
        return find_loss(self.config.loss)

    @functools.cached_property
    def _advantage(self) -> Advantage:
        return find_advantage(self.config.advantage)

    @functools.cached_property
    def _metrics(self) -> Sequence[Metric]:
        return find_metrics(self.config.metrics or ())


@dataclasses.dataclass(frozen=True)
class PreferenceObjective:
    """The loss of --stage dpo. The responses of a pair are neighbours, the chosen one first; a pair counts once.

    Those to another prompt follow, if the loss reads them.
    """

    config: PreferenceConfig
    max_tokens: int
    """The most tokens that a response may have."""
    takes_entropies = False
    divergences: Mapping[str, Divergence] = dataclasses.field(default_factory=dict)

    def share(self, num_targets: int, num_responses: int) -> int:
        return num_responses // self._preference.num_responses

    def loss(
        self,
        log_probs: RoleLogProbs,
        engine_N: torch.Tensor,
        advantages_N: torch.Tensor,
        sequences_N: torch.Tensor,
        lengths_S: torch.Tensor,
    ) -> tuple[torch.Tensor, Statistics]:
        """Return the sum of the losses of pairs, and sums over the pairs."""
        sequences = Sequences(sequences_N, lengths_S, self.max_tokens)
        policy_S = sequences.total(log_probs.policy_N)
        beyond_S = policy_S
        if self._preference.has_reference:
            beyond_S = sequences.total(log_probs.policy_N - log_probs.others[REFERENCE.name])
        size = self._preference.num_responses
        chosen, rejected = slice(0, None, size), slice(1, None, size)
        strangers = beyond_S.view(-1, size)[:, 2:]
        pairs = Pairs(beyond_S[chosen], beyond_S[rejected], lengths_S[chosen], lengths_S[rejected], strangers)
        total = self._preference.compute(pairs, self.config).sum()
        with torch.no_grad():
            chosen_P, rejected_P = pairs.chosen_P, pairs.rejected_P
            if not self._preference.has_reference:
                chosen_P, rejected_P = chosen_P / pairs.chosen_lengths_P, rejected_P / pairs.rejected_lengths_P
            measured = {
                "chosen": self.config.beta * chosen_P,
                "rejected": self.config.beta * rejected_P,
                "accuracy": chosen_P > rejected_P,
                "log_prob.chosen": policy_S[chosen],
                "log_prob.rejected": policy_S[rejected],
            }
            sums = {name: values_P.sum(dtype=torch.float64) for name, values_P in measured.items()}
            sums["loss"] = total.detach()
        return total, Statistics(sums, {})

    @property
    def _preference(self) -> Preference:
        return PREFERENCES[self.config.loss]


def _spread(counted: str, advantages_N: torch.Tensor, sequences: Sequences) -> dict[str, torch.Tensor]:
    """Return the statistics for `compute_deviation`: of advantages with the divergences taken off."""
    num_responses = len(sequences.lengths_S)
    return {
        "advantage.squares": WEIGHTS[counted](sequences, advantages_N.double().square()).sum(),
        "advantage.count": torch.tensor(
            float(count_share(counted, len(advantages_N), num_responses, sequences.max_tokens))
        ),
    }


def _measure(surrogate: Surrogate, correction: Correction | None, old_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sum the values over the targets that the metrics are means of."""
    sums = {
        "targets": torch.tensor(float(len(old_N))),
        "ratio": surrogate.ratio_N.sum(dtype=torch.float64),
        # The old policy sampled the tokens, so the mean of this estimates its entropy without bias.
        "entropy": -old_N.sum(dtype=torch.float64),
    }
    for name, is_bounded_N in (
        ("clipped_low", surrogate.is_low_N),
        ("clipped_high", surrogate.is_high_N),
        ("clipped_dual", surrogate.is_dual_N),
    ):
        if is_bounded_N is not None:
            sums[name] = is_bounded_N.sum()
    if correction is not None:
        sums["correction"] = correction.weight_N.sum(dtype=torch.float64)
        sums["correction.bounded"] = correction.is_bounded_N.sum()
        sums["correction.rejected"] = correction.is_rejected_N.sum()
    return sums
