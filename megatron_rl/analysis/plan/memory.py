"""The check that a split fits the devices' memory, by the formulas of `config/rank_bytes.py`.

The optimizer is Adam, divided over replicas; weights are bf16, gradients and states fp32.
"""

from megatron_rl.analysis.plan.figures import DeviceSplit, TrainedAdapters, count_context_bytes
from megatron_rl.config.rank_bytes import Micro, ParameterBytes, RankMemory, RankSplit, Recomputed, count_parameters
from megatron_rl.types import Architecture

_GIB = 1 << 30
_WEIGHT = 2
# The share of a device's memory that vLLM takes by default, and its bytes besides weights and the cache.
_ENGINE_SHARE, _ENGINE_OTHER = 0.9, 4 * _GIB
# The share of a trainer's memory that is left by the device itself, collectives and gaps between blocks.
_TRAINER_SHARE = 0.92


def count_trainer_bytes(
    architecture: Architecture,
    split: DeviceSplit,
    micro: Micro,
    num_frozen: int = 0,
    recomputes: bool = False,
    num_virtual: int = 1,
    adapters: TrainedAdapters | None = None,
) -> int:
    """Count the bytes of a rank of the stage that takes most."""
    of_rank = RankSplit(split.tensor, split.pipeline, num_virtual, split.context, split.expert, replicas=split.replicas)
    recomputed = Recomputed(method="uniform") if recomputes else Recomputed()
    bytes_of = ParameterBytes()
    if adapters is not None:
        # Adapters leave their base to all roles.
        share, num_frozen = adapters.num_parameters / count_parameters(architecture).total, 0
        bytes_of = ParameterBytes(gradient=share * bytes_of.gradient, state=share * bytes_of.state)
    memory = RankMemory(architecture, of_rank, bytes_of, recomputed, num_frozen)
    return memory.estimate(micro).total


def fits_trainer(
    architecture: Architecture,
    split: DeviceSplit,
    micro: Micro,
    gib: float,
    num_frozen: int = 0,
    recomputes: bool = False,
    num_virtual: int = 1,
    adapters: TrainedAdapters | None = None,
) -> bool:
    """Check that a rank fits a device with `gib` GiB."""
    most = count_trainer_bytes(architecture, split, micro, num_frozen, recomputes, num_virtual, adapters)
    return most <= gib * _GIB * _TRAINER_SHARE


def count_running(
    architecture: Architecture, tensor: int, context: float, gib: float, adapters: TrainedAdapters | None = None
) -> int:
    """Count the responses of `context` tokens, prompts included, that an engine's cache holds; 0 if none fits."""
    size = count_parameters(architecture)
    # Each device is counted a whole slot: factors are divided in part only.
    in_slots = 0 if adapters is None else adapters.num_in_slots
    room = tensor * (gib * _GIB * _ENGINE_SHARE - _ENGINE_OTHER - in_slots * _WEIGHT) - size.total * _WEIGHT
    # With more devices than query groups, keys and values of a group lie on several devices.
    copies = max(1, tensor // architecture.num_query_groups)
    return max(0, int(room / (count_context_bytes(architecture) * copies * context)))
