"""Costs without a run, from a model's and devices' figures: arithmetic, bytes, and assumed shares of both."""

import dataclasses

from megatron_rl.analysis.plan.chips import ASSUMED, Assumptions, DeviceFigures
from megatron_rl.analysis.plan.costs import BatchingCosts, Costs, TrainerCosts, publish_seconds
from megatron_rl.config.rank_bytes import ParameterCounts, count_parameters
from megatron_rl.shared.weights.adapters import AdapterMapping
from megatron_rl.shared.weights.delivery.tree import plan_tree
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.types import Architecture

_BYTES = 2
# Operations a parameter in the forward pass; the backward pass takes twice as many.
_FLOPS_OF_PARAMETER = 2
# Attention's kernels compute the scores again in their backward pass: 2.5 times the forward pass.
_ATTENTION_PASSES = 3.5
# Bytes a parameter that an optimizer's step reads and writes: gradient, two moments, the copy in fp32, the weight.
_OPTIMIZER_BYTES = 30
_GRADIENT_BYTES = 4


@dataclasses.dataclass(frozen=True)
class DeviceSplit:
    """The division of devices between the trainer and the engines."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    replicas: int = 1
    num_engines: int = 1
    engine_tensor: int = 1

    @property
    def trainer_devices(self) -> int:
        return self.tensor * self.pipeline * self.context * self.replicas

    @property
    def engine_devices(self) -> int:
        return self.num_engines * self.engine_tensor


@dataclasses.dataclass(frozen=True)
class TrainedAdapters:
    """The adapters that are trained in place of the weights."""

    rank: int
    num_parameters: int
    is_published_alone: bool = False
    """True if engines hold the base, and get adapters alone."""

    @classmethod
    def of(cls, architecture: Architecture, rank: int, is_published_alone: bool) -> "TrainedAdapters":
        """Count the adapters of this rank of all layers that have one by default."""
        specs = AdapterMapping(Mapping(architecture), rank).manifest(architecture.dtype)
        return cls(rank, sum(spec.num_elements for spec in specs), is_published_alone)

    @property
    def num_in_slots(self) -> int:
        """The parameters that an engine has beside the model's."""
        return self.num_parameters if self.is_published_alone else 0


def estimate(
    architecture: Architecture,
    chip: DeviceFigures,
    split: DeviceSplit,
    max_running: int,
    assumptions: Assumptions = ASSUMED,
    num_frozen: int = 0,
    recomputes: bool = False,
    adapters: TrainedAdapters | None = None,
    devices_per_host: int = 8,
) -> Costs:
    """Estimate the costs of a run of the model on these devices, with this split."""
    size = count_parameters(architecture)
    # As many times as the weights leave each host of the trainer, which has its own part of them.
    num_sent = _count_sent(-(-split.engine_devices // devices_per_host)) / -(-split.trainer_devices // devices_per_host)
    network = chip.network * assumptions.network / max(1.0, num_sent)
    in_slots = 0 if adapters is None else adapters.num_in_slots
    return Costs(
        engine=_estimate_engine(architecture, size, chip, split.engine_tensor, max_running, assumptions, in_slots),
        trainer=_estimate_trainer(architecture, size, chip, split, assumptions, num_frozen, recomputes, adapters),
        publish=publish_seconds(assumptions.publish_seconds, (in_slots or size.total) * _BYTES, network),
    )


def _count_sent(num_hosts: int) -> int:
    """Count the hosts of engines that get the weights from the trainer."""
    roots, _ = plan_tree([str(number) for number in range(num_hosts)])
    return len(roots)


def count_context_bytes(architecture: Architecture) -> int:
    """Count the bytes that an engine keeps for a token: keys and values of full attention, or their narrow rows."""
    return architecture.num_full_layers * architecture.cached_channels * _BYTES


def _estimate_engine(
    architecture: Architecture,
    size: ParameterCounts,
    chip: DeviceFigures,
    tensor: int,
    max_running: int,
    assumptions: Assumptions,
    in_slots: int,
) -> BatchingCosts:
    bandwidth = tensor * chip.bandwidth * assumptions.decoding
    flops = tensor * chip.flops * assumptions.prefill
    sums = 2 * architecture.num_layers if tensor > 1 else 0
    moved = sums * 2 * architecture.hidden_size * _BYTES * (tensor - 1) / tensor / (chip.link * assumptions.network)
    of_token = _FLOPS_OF_PARAMETER * (size.active + in_slots) / flops + moved
    read = (size.total + in_slots) * _BYTES
    return BatchingCosts(
        # All weights are read, since a large enough batch has tokens for every expert.
        step=assumptions.step_seconds + sums * assumptions.collective_seconds + read / bandwidth,
        per_sequence=of_token,
        per_context=count_context_bytes(architecture) / bandwidth,
        per_prompt_token=of_token,
        max_running=max_running,
        max_in_flight=2 * max_running,
        is_chosen=True,
    )


def _estimate_trainer(
    architecture: Architecture, size: ParameterCounts, chip: DeviceFigures, split: DeviceSplit,
    assumptions: Assumptions, num_frozen: int, recomputes: bool, adapters: TrainedAdapters | None,
) -> TrainerCosts:  # fmt: skip
    hidden, layers = architecture.hidden_size, architecture.num_layers
    ranks = split.tensor * split.context
    flops = chip.flops * assumptions.training * ranks
    link = chip.link * assumptions.network
    # Frozen weights have no gradients, which are a third of the products; adapters have all three.
    num_again, num_trained = int(recomputes), size.total if adapters is None else adapters.num_parameters
    passes = num_again + (3 if adapters is None else 2)
    of_adapters = 0 if adapters is None else (3 + num_again) * num_trained
    # Two sums a layer, forward and again backward; each moves every rank's part twice.
    moved = layers * 4 * 2 * hidden * _BYTES * (split.tensor - 1) / split.tensor / split.context
    if architecture.experts:
        # To experts and back, forward and backward; experts on other hosts are reached by the network.
        sent = (
            layers * 4 * architecture.experts.num_active * hidden * _BYTES * (split.expert - 1) / split.expert / ranks
        )
        moved += sent * (1.0 if split.expert * split.tensor <= 8 else chip.link / chip.network)
    # Products with keys and with values: half of the operations each.
    queries = architecture.num_attention_heads * (architecture.kv_channels + architecture.value_channels) // 2
    of_pair = 2 * _FLOPS_OF_PARAMETER * architecture.num_full_layers * queries * (_ATTENTION_PASSES + num_again) / flops
    of_token = _FLOPS_OF_PARAMETER * (passes * size.active + of_adapters) / flops + moved / link
    of_stage = num_trained / (split.tensor * split.pipeline)
    is_divided = split.replicas * split.context > 1
    exchanged = of_stage * (_GRADIENT_BYTES + _BYTES) / (chip.network * assumptions.network) if is_divided else 0.0
    stepped = of_stage / (split.replicas * split.context) * _OPTIMIZER_BYTES / (chip.bandwidth * assumptions.decoding)
    return TrainerCosts(
        per_token=of_token,
        per_pair=of_pair,
        per_micro_batch=0.002 * layers,
        backward_share=(passes - 1) / passes,
        output_share=size.of_vocabulary / size.active,
        exchange=_exchange(split, hidden, chip, assumptions),
        num_frozen=num_frozen,
        update=exchanged + stepped,
    )


def _exchange(split: DeviceSplit, hidden: int, chip: DeviceFigures, assumptions: Assumptions) -> float:
    """Estimate the seconds in which a micro-batch of some thousand tokens moves from one stage to the next."""
    tokens = 8192 / (split.tensor * split.context)
    return 0.0 if split.pipeline == 1 else 1e-4 + tokens * hidden * _BYTES / (chip.network * assumptions.network)
