"""The memory that a rank will take, counted before the rank exists.

A rank of each pipeline stage is built in this process, on tensors without memory, and with process groups that reach no
other process. The largest micro-batch goes through it, and the tensors that its backward pass needs are added up.

Stand-ins replace attention and experts. Attention keeps what a fused kernel keeps, and experts get equal shares of
tokens.
"""

import contextlib
import copy
import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.algorithm.declaration import HEAD
from megatron_rl.config.serve import MOST_NAMED, MOST_UNNAMED
from megatron_rl.config.settings import Settings
from megatron_rl.shared.device_memory import (
    CHUNK_ROWS,
    LOGITS,
    SHARED_VERSIONS,
    RankSplit,
    count_chunks_in_flight,
    count_frozen,
    count_streamed,
    keeps_old_policy,
    make_look_up,
    read_parameter_bytes,
)
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.trainer.data.packing import Pack, pack_groups
from megatron_rl.trainer.mcore.model import context
from megatron_rl.trainer.mcore.model.attention import SharedPromptAttention
from megatron_rl.trainer.mcore.model.gated_delta_net import GatedDeltaRule
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, build_chunks
from megatron_rl.trainer.mcore.model.lora import attach_adapters
from megatron_rl.trainer.mcore.session import find_coordinates, make_groups
from megatron_rl.trainer.mcore.step.critic import PolicyHead
from megatron_rl.types import ParallelSizes


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of a rank, as far as it decides how much memory the rank takes."""

    world_size: int
    lengths: Sequence[tuple[int, Sequence[int]]]
    """The number of tokens of each prompt and its responses in the largest micro-batch."""
    multiple_of: int
    num_micro_batches: int
    """The number of micro-batches in one run of the schedule."""
    num_updates: int
    """The number of updates in an iteration."""


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The bytes of a rank of a pipeline stage, by purpose."""

    stage: int
    num_parameters: int
    device: dict[str, int]
    host: dict[str, int]


def count(settings: Settings, work: Workload) -> list[Footprint]:
    """Count the memory of a rank of each pipeline stage; no process group may exist."""
    sizes = settings.parallel_sizes
    groups = [([0] * prompt, [[0] * length for length in responses]) for prompt, responses in work.lengths]
    pack = pack_groups(groups, work.multiple_of).divided(sizes.context)
    return [_count_stage(settings, work, pack, stage) for stage in range(sizes.pipeline)]


def _count_frozen(settings: Settings) -> tuple[int, int]:
    """Count the bytes of a stage's frozen parameters, and the bytes of two layers."""
    config = copy.copy(settings.transformer)
    chunks = build_chunks(config, settings.architecture, settings.model.make_vocab_size_divisible_by)
    weights = sum(one.numel() * one.element_size() for chunk in chunks for one in chunk.parameters())
    return weights, 2 * weights // max(1, sum(len(chunk.decoder.layers) for chunk in chunks))


def _count_stage(settings: Settings, work: Workload, pack: Pack, stage: int) -> Footprint:
    with _be_one_rank(settings.parallel_sizes, work.world_size, stage), FakeTensorMode(allow_non_fake_inputs=True):
        config = copy.copy(settings.transformer)
        chunks = build_chunks(config, settings.architecture, settings.model.make_vocab_size_divisible_by)
        if settings.lora.rank:
            attach_adapters(settings, chunks, find_coordinates())
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        own = _Bytes.of(settings, parameters)
        has_head = settings.critic is not None and settings.algorithm.critic == HEAD
        head = [PolicyHead(settings.transformer)] if has_head else []
        kept = [_count_kept(chunk, pack, head) for chunk in chunks]
        # Read before a layer is counted, for which the chunk loses its output layer.
        is_last = chunks[-1].post_process
        together = _count_recomputed_together(settings, len(chunks[-1].decoder.layers))
        of_layer = together * _count_kept_of_a_layer(chunks[-1], pack)
        of_teachers = [_count_frozen(teacher) for teacher in settings.frozen.values()]
        of_critic = None
        if settings.critic is not None and head:
            of_critic = _Bytes.of(settings.critic, [*head[0].parameters()]), [0] * len(chunks)
        elif settings.critic is not None:
            of_critic = _count_trained(settings.critic, pack)
    look_up, is_offloaded = make_look_up(settings), settings.loop.frozen_offload
    num_frozen = count_frozen(look_up, work.num_updates)
    # The reference of adapters is their base, and the old policy has a copy of them alone.
    has_old = keeps_old_policy(look_up, work.num_updates)
    frozen = has_old * own.trained if settings.lora.rank else num_frozen * own.weights
    layers = 2 * own.weights // max(1, sum(len(chunk.decoder.layers) for chunk in chunks)) if num_frozen else 0
    for weights, of_two_layers in of_teachers:
        frozen, layers = frozen + weights, max(layers, of_two_layers)
    is_published, is_shared = settings.run.is_sampled, settings.rollout.transport == "shm"
    dtype = DTYPES[settings.publish.dtype or settings.architecture.dtype]
    num_parameters = sum(parameter.numel() for parameter in parameters)
    num_published = _count_published(settings, parameters)
    if of_critic is not None:
        # Its activations come and go with the policy's.
        bytes_of_critic, kept_of_critic = of_critic
        own, kept = own + bytes_of_critic, [*map(operator.add, kept, kept_of_critic)]
        frozen += bytes_of_critic.weights if work.num_updates > 1 else 0
    activations = _count_in_flight(settings, work, stage) * sum(kept) // len(kept)
    # An update begins once the activations are gone.
    of_update = _count_of_update(settings, parameters, own.optimizer) - activations
    device = {
        "weights": own.weights,
        "gradients": own.gradients,
        "optimizer": own.optimizer,
        "frozen": layers if is_offloaded else frozen,
        "activations": activations,
        "workspace": max(of_layer + (_count_logits(settings, pack) if is_last else 0), of_update),
        "publish": count_streamed(settings.architecture, dtype.itemsize) if is_published and not is_shared else 0,
    }
    host = {
        "publish": SHARED_VERSIONS * num_published * dtype.itemsize if is_published and is_shared else 0,
        "optimizer": own.offloaded,
        "frozen": frozen if is_offloaded else 0,
        # By turns, everything leaves that is on the device between iterations, but gradients.
        "turns": own.weights + own.optimizer + (0 if is_offloaded else frozen) if settings.rollout.takes_turns else 0,
        # A save in the background writes from a copy of everything that the rank writes.
        "save": own.optimizer + own.offloaded + own.weights if settings.checkpoint.async_save else 0,
    }
    if settings.run.stage == "serve":
        host["models"] = _count_served(settings, own)
        # What a pass adds to.
        device["gradients"] *= 2
    return Footprint(stage, num_parameters, device, host)


def _count_served(settings: Settings, own: "_Bytes") -> int:
    """Count the models of a service that are not in the chunks, their base, and the weights kept for samplers."""
    most = settings.serve.most_models
    num_kept = 1 + MOST_NAMED + most * MOST_UNNAMED
    return (most - 1) * (own.trained + own.optimizer + own.gradients) + num_kept * own.trained


def _count_published(settings: Settings, parameters: Sequence[torch.nn.Parameter]) -> int:
    """Count the numbers that a rank publishes: with adapters these alone, or the base's weights with them merged."""
    is_alone = settings.publish.lora == "adapter"
    return sum(one.numel() for one in parameters if not settings.lora.rank or one.requires_grad is is_alone)


@contextlib.contextmanager
def _be_one_rank(sizes: ParallelSizes, world_size: int, stage: int) -> Iterator[None]:
    """Be the first rank of a pipeline stage, among ranks that do not exist."""
    rank = stage * (world_size // sizes.pipeline)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        make_groups(sizes, create_gloo_process_groups=False)
        # This tracker draws no numbers, because states of a generator cannot be compared here.
        tensor_parallel.model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class _Bytes:
    """The bytes that a rank keeps for its parameters."""

    weights: int
    trained: int
    """The bytes of the weights that are trained."""
    gradients: int
    optimizer: int
    offloaded: int
    """The bytes of the optimizer's state on the host."""

    def __add__(self, other: "_Bytes") -> "_Bytes":
        return _Bytes(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @classmethod
    def of(cls, settings: Settings, parameters: Sequence[torch.nn.Parameter]) -> "_Bytes":
        size = settings.transformer.params_dtype.itemsize
        total = sum(parameter.numel() for parameter in parameters)
        if settings.lora.rank:
            # A frozen model has only weights.
            parameters = [parameter for parameter in parameters if parameter.requires_grad]
        experts = sum(parameter.numel() for parameter in parameters if not getattr(parameter, "allreduce", True))
        others = sum(parameter.numel() for parameter in parameters) - experts
        owned: float = others + experts
        if settings.ddp.use_distributed_optimizer:
            owned = others / parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            owned += experts / parallel_state.get_expert_data_parallel_world_size()
        of_one = read_parameter_bytes(make_look_up(settings))
        state = round(owned * of_one.state)
        return cls(
            weights=total * size,
            trained=(others + experts) * size,
            gradients=round((others + experts) * of_one.gradient),
            optimizer=round(state * (1 - of_one.offloaded)),
            offloaded=round(state * of_one.offloaded),
        )


def _count_trained(settings: Settings, pack: Pack) -> tuple[_Bytes, list[int]]:
    """Count the bytes of another model that is trained, and those that each chunk keeps of a micro-batch."""
    config = copy.copy(settings.transformer)
    chunks = build_chunks(config, settings.architecture, settings.model.make_vocab_size_divisible_by)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    return _Bytes.of(settings, parameters), [_count_kept(chunk, pack) for chunk in chunks]


def _count_logits(settings: Settings, pack: Pack) -> int:
    """Count the bytes of the largest block of logits."""
    columns = -(-settings.architecture.vocab_size // settings.parallel_sizes.tensor)
    return min(LOGITS, pack.num_targets * columns * settings.transformer.params_dtype.itemsize)


def _count_of_update(settings: Settings, parameters: Sequence[torch.nn.Parameter], state: int) -> int:
    """Count the bytes that are taken for a moment in an update.

    On a CPU torch's Adam computes a divisor for one tensor after the other, in two tensors of its size, while the
    divisor of the one before still exists.
    """
    if settings.platform != "cpu" or settings.optimizer.optimizer != "adam":
        return 0
    # A rank with a part of the optimizer's state has no larger tensors than this part.
    owned = state // round(read_parameter_bytes(make_look_up(settings)).state)
    sizes = [min(owned, one.numel()) for one in parameters if one.requires_grad and one.ndim > 1]
    return 4 * max((before + 2 * size for before, size in itertools.pairwise([0, *sizes])), default=0)


def _count_in_flight(settings: Settings, work: Workload, stage: int) -> int:
    sizes = settings.parallel_sizes
    together = settings.transformer.microbatch_group_size_per_vp_stage or sizes.pipeline
    split = RankSplit(pipeline=sizes.pipeline, num_virtual=sizes.virtual_pipeline or 1, together=together)
    return count_chunks_in_flight(split, stage, work.num_micro_batches)


def _count_kept(chunk: PackedGPTModel, pack: Pack, heads: Sequence[torch.nn.Module] = ()) -> int:
    """Count the bytes that autograd keeps for a micro-batch, without weights."""
    _stand_in(chunk)
    own = {parameter.untyped_storage()._cdata for parameter in chunk.parameters()}
    # The tensors are kept, so that no two storages have the same address.
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage()._cdata
        if address not in own:
            kept[address] = tensor
        return tensor

    if not chunk.pre_process:
        chunk.set_input_tensor(_make_input(chunk, pack))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk(pack, heads=heads)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _count_kept_of_a_layer(chunk: PackedGPTModel, pack: Pack) -> int:
    """Count the bytes that a layer keeps without recomputation; gradients in its backward pass take the same."""
    config: TransformerConfig = chunk.config
    changed = config.recompute_granularity
    num_layers = max(1, len(chunk.decoder.layers))
    # Only the layers are counted: neither the embedding nor the output layer.
    chunk.pre_process = chunk.post_process = False
    chunk.decoder.pre_process = False
    config.recompute_granularity = None if changed == "full" else changed
    return _count_kept(chunk, pack) // num_layers


def _count_recomputed_together(settings: Settings, num_layers: int) -> int:
    """Count the layers whose activations exist at once in the backward pass; 1 if none is recomputed."""
    config = settings.transformer
    if config.recompute_granularity != "full" or config.recompute_method != "uniform":
        return 1
    return max(1, min(config.recompute_num_layers, num_layers))


def _make_input(chunk: PackedGPTModel, pack: Pack) -> torch.Tensor:
    """Make the input that the previous stage would send."""
    config = chunk.config
    rows = pack.num_tokens // config.context_parallel_size
    rows //= config.tensor_model_parallel_size if config.sequence_parallel else 1
    return torch.empty(rows, 1, config.hidden_size, dtype=config.params_dtype, requires_grad=True)


def _stand_in(chunk: PackedGPTModel) -> None:
    """Replace the modules that read numbers, which tensors without memory lack: attention, and routed experts.

    The gated delta rule of linear layers is replaced by what its kernels keep.
    """
    for module in list(chunk.modules()):
        for name, child in module.named_children():
            if isinstance(child, SharedPromptAttention):
                setattr(module, name, _Attention(child.context_group))
            elif isinstance(child, GatedDeltaRule):
                setattr(module, name, _Rule())
            elif isinstance(child, MoELayer):
                setattr(module, name, _Experts(child))


class _Attention(torch.nn.Module):
    """A stand-in for attention. It keeps queries, keys, values, the result, and a number for each query and head."""

    def __init__(self, context_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.context_group = context_group

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q_RHD, k_RGD, v_RGD = (tensor.squeeze(1) for tensor in (query, key, value))
        q_THD, k_TGD, v_TGD = context.exchange_rows_for_heads(q_RHD, k_RGD, v_RGD, self.context_group)
        totals_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        out_THD: torch.Tensor = _Keeps.apply(q_THD.shape, q_THD, k_TGD, v_TGD, totals_TH)
        return context.exchange_heads_for_rows(out_THD, self.context_group).reshape(len(query), 1, -1)


class _Rule(torch.nn.Module):
    """A stand-in for the gated delta rule. It keeps what it is given, the result, and a system for each chunk."""

    def forward(self, q_TGD: torch.Tensor, k_TGD: torch.Tensor, v_THV: torch.Tensor, *others: Any) -> torch.Tensor:
        *decays_betas, _ = others
        copies = v_THV.shape[1] // q_TGD.shape[1]
        q_THD, k_THD = (one.repeat_interleave(copies, dim=1) for one in (q_TGD, k_TGD))
        systems = v_THV.new_empty(*v_THV.shape[:2], CHUNK_ROWS)
        out_THV: torch.Tensor = _Keeps.apply(v_THV.shape, v_THV, q_THD, k_THD, *decays_betas, systems)
        return out_THV


class _Experts(torch.nn.Module):
    """A stand-in for experts. It keeps what Megatron's dispatcher and experts keep for an equal share of tokens.

    A shared expert reads no numbers, and stays.
    """

    def __init__(self, layer: MoELayer) -> None:
        super().__init__()
        self.config = layer.config
        self.shared_experts = layer.shared_experts

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        config = self.config
        num_rows, size = hidden_states.numel() // config.hidden_size, config.expert_tensor_parallel_size or 1
        # Every tensor-parallel rank of an expert has all of its tokens, and some of its columns.
        routed, columns = num_rows * config.moe_router_topk * size, config.moe_ffn_hidden_size // size
        like, wide = hidden_states, config.hidden_size
        # In experts' order, and on their rank; the gated layer's halves, and the steps to their product; the way back.
        widths = (wide, wide, 2 * columns, columns, columns, columns, wide)
        kept = [like.new_empty(routed, width) for width in widths]
        scores = like.new_empty(num_rows, config.num_moe_experts, dtype=torch.float32)
        out = _Keeps.apply(like.shape, like, scores, *kept)
        return (out if self.shared_experts is None else out + self.shared_experts(hidden_states)), None


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: torch.Size, *tensors: torch.Tensor) -> torch.Tensor:
        out = tensors[0].new_empty(shape)
        ctx.save_for_backward(*tensors, out)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("a model that is counted is not trained")
