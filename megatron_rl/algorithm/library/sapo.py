"""SAPO: a soft gate in place of a clip."""

import dataclasses

from megatron_rl.algorithm.declaration import Algorithm, Loss, Paper, Preset, Surrogate, Targets
from megatron_rl.flag import own_flag


@dataclasses.dataclass(frozen=True)
class SapoSettings:
    """The steepness of the gate."""

    sapo_temperature_pos: float = own_flag(
        1.0, "The steepness of the gate of `--grpo-loss sapo` where advantages are positive.", bound="above 0"
    )
    sapo_temperature_neg: float = own_flag(
        1.05, "The steepness of the gate of `--grpo-loss sapo` where advantages are not positive.", bound="above 0"
    )


def compute_loss(targets: Targets, settings: SapoSettings) -> Surrogate:
    """Compute -4 / t sigmoid(t (ratio - 1)) A; t depends on the advantage's sign."""
    ratio_N, advantages_N = targets.ratio_N, targets.advantages_N
    positive = advantages_N.new_full((), settings.sapo_temperature_pos)
    temperature_N = positive.where(advantages_N > 0, advantages_N.new_full((), settings.sapo_temperature_neg))
    gate_N = (temperature_N * (ratio_N - 1)).sigmoid() * 4 / temperature_N
    return Surrogate(-gate_N * advantages_N, ratio_N)


SAPO = Algorithm(
    Paper("SAPO", "https://arxiv.org/abs/2511.20347"),
    losses=(
        Loss(
            "sapo",
            "-(4 / t) sigmoid(t (q - 1)) A",
            compute_loss,
            "t is `--sapo-temperature-pos` where A is above 0, else `--sapo-temperature-neg`",
            ("sapo_temperature_pos", "sapo_temperature_neg"),
        ),
    ),
    presets=(Preset("sapo", {"loss": "sapo", "advantage": "grpo", "aggregation": "sequence"}),),
)
