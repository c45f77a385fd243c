"""The algorithms that have a name here: a file declares one with its variants, and this is their registry.

A new algorithm is a file with an `Algorithm`, and its entry in `ALGORITHMS`. Settings that only its loss reads are a
dataclass of that file, and a base of `LossSettings`. Flags, checks and tables of the documents follow.
"""

import dataclasses
from collections.abc import Mapping

from megatron_rl.algorithm.declaration import Advantage, Algorithm, Loss, Preference, Preset
from megatron_rl.algorithm.library import cispo, dpo, dppo, gdpo, grpo, gspo, opd, ppo, reinforce, sapo

ALGORITHMS: Mapping[str, Algorithm] = {
    "ppo": ppo.PPO,
    "grpo": grpo.GRPO,
    "dr_grpo": grpo.DR_GRPO,
    "dapo": grpo.DAPO,
    "gspo": gspo.GSPO,
    "cispo": cispo.CISPO,
    "sapo": sapo.SAPO,
    "rloo": reinforce.RLOO,
    "reinforce_plus_plus": reinforce.REINFORCE_PLUS_PLUS,
    "gdpo": gdpo.GDPO,
    "dppo": dppo.DPPO,
    "opd": opd.OPD,
    "vapo": ppo.VAPO,
    "dpo": dpo.DPO,
    "slic": dpo.SLIC,
    "ipo": dpo.IPO,
    "kto": dpo.KTO,
    "simpo": dpo.SIMPO,
}


@dataclasses.dataclass(frozen=True)
class LossSettings(ppo.ClipSettings, sapo.SapoSettings, dppo.DppoSettings):
    """The settings that only some losses read."""


LOSS_FIELDS = frozenset(field.name for field in dataclasses.fields(LossSettings))

# What --grpo-loss, --grpo-advantage, --algorithm and --dpo-loss-type may name.
LOSSES: dict[str, Loss] = {loss.name: loss for algorithm in ALGORITHMS.values() for loss in algorithm.losses}
ADVANTAGES: dict[str, Advantage] = {
    advantage.name: advantage for algorithm in ALGORITHMS.values() for advantage in algorithm.advantages
}
PRESETS: dict[str, Preset] = {preset.name: preset for algorithm in ALGORITHMS.values() for preset in algorithm.presets}
PREFERENCES: dict[str, Preference] = {
    one.name: one for algorithm in ALGORITHMS.values() for one in algorithm.preferences
}
