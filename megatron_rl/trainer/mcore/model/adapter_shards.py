"""The factors of adapters as engines get them: B is multiplied by alpha over rank, so that a product needs no scale."""

import dataclasses

import torch

from megatron_rl.shared.weights.shards import Shard
from megatron_rl.trainer.mcore.model.lora import Adapters


@dataclasses.dataclass(frozen=True)
class ScaledShard(Shard):
    """A factor that is exported with the scale in it."""

    scale: float

    def values(self) -> torch.Tensor:
        """Return the scaled factor, in float32 at least."""
        factor = self.parameter.detach()
        return factor.to(torch.promote_types(factor.dtype, torch.float32)) * self.scale


def list_scaled(adapters: Adapters) -> list[Shard]:
    """Return this rank's factors, with the scale in those of B."""
    scale = adapters.alpha / adapters.mapping.rank
    return [
        ScaledShard(shard.parameter_name, shard.parameter, shard.map, scale)
        if shard.parameter_name.endswith(".lora_B.weight")
        else shard
        for shard in adapters.shards
    ]
