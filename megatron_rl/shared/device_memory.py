"""The memory of a device: the bytes that a rank and an engine need, from a run's settings and a model's shapes.

`RankMemory.estimate` has formulas for a rank. Megatron's own layers are estimated, with attention as a fused kernel;
fused layers keep less. `trainer.mcore.footprint` counts a rank exactly, with the same constants.

With --rollout-colocate, `divide` shares a device between a rank and an engine, since vLLM alone would take nearly all
of it, and `take_turns` gives each of them all that the other leaves there. Invariants:

- the cache never exceeds what all responses that are sampled at once fill at their full length, since the rest of it
  would stay empty;
- the cache holds at least one response at its full length, or the division is refused;
- rank, engine and a reserve together never exceed the device; by turns, each with what is left of the other.

The bytes of an engine's work are estimates, on the large side. Where they are wrong, vLLM's own flags divide instead.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.algorithm.declaration import HEAD
from megatron_rl.algorithm.library import PREFERENCES
from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.errors import UsageError
from megatron_rl.shared.protocol.wire import BUFFER_BYTES, NUM_BUFFERS
from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.shared.weights.mapping import Mapping, TensorSpec
from megatron_rl.types import SAMPLED, Architecture

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# A rank.
LOGITS = 1 << 29
"""The largest block of logits of any backend, which its gradient replaces."""
SHARED_VERSIONS = 2
"""The versions in shared memory: the one that engines sample with, and the one before or after it."""
CHUNK_ROWS = 64
"""The rows of a chunk of linear layers, each of which keeps a square of them."""
# What a rank takes beyond the count: buffers of collectives, kernels' workspaces, gaps between blocks of memory.
_UNCOUNTED = 0.15

# An engine.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks of vLLM's slots for adapters."""
# A multiple of the block sizes that vLLM's attention uses on devices.
_BLOCK_TOKENS = 64
# Graphs that vLLM captures, and the scratch of the digests that prove a publish.
_GRAPHS, _DIGESTS = GIB, GIB // 2
# The most tokens of a step in which vLLM's server reads prompts, on any device with less than 160 GiB.
_STEP_TOKENS = 8192
# Logits of the responses in float32: as computed, divided by the temperature, as log-probs, and with noise.
_LOGITS_COPIES = 4

# A device.
# The context of a process on a device, with the workspaces of its libraries.
_CONTEXT = GIB
# A rank that is off its device leaves collectives and libraries there, a sleeping engine its captured graphs.
_LEFT_BY_RANK, _LEFT_BY_ENGINE = 2 * _CONTEXT, _CONTEXT + _GRAPHS
# The share of a device that is left to neither.
_RESERVE = 0.03

PACK_FLAG = "--max-tokens-per-gpu"
"""The flag with which micro-batches no longer follow from devices, nor what is computed again."""
RECOMPUTE_NORMS = "--recompute-granularity selective --recompute-modules layernorm"
FLAG_OF_SHARING = "--rollout-colocate"
DIVIDED_BY_USER = "--rollout-vllm-args='--gpu-memory-utilization 0.3'"
"""An example of a flag with which a user divides a device instead."""

LookUp = Callable[[str], Any]
"""A function that returns the value of a target such as `optimizer.optimizer`, or its default."""


def make_look_up(settings: Any) -> LookUp:
    return lambda target: operator.attrgetter(target)(settings)


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Counts of a model's parameters; those of a layer are means, since the first layers may have no experts."""

    of_layer: float
    """Parameters of a layer without its experts."""
    of_experts: float
    """Parameters of all experts of a layer."""
    of_vocabulary: int
    """Parameters of the output layer; the embedding has as many again unless it is tied."""


@functools.cache
def count_parameters(architecture: Architecture) -> ParameterCounts:
    sizes = collections.Counter[bool]()
    for spec in Mapping(architecture).manifest():
        sizes[".experts." in spec.name] += spec.num_elements
    of_vocabulary = architecture.hidden_size * architecture.vocab_size
    others = sizes[False] - of_vocabulary * (1 if architecture.tied_embeddings else 2)
    return ParameterCounts(others / architecture.num_layers, sizes[True] / architecture.num_layers, of_vocabulary)


@dataclasses.dataclass(frozen=True)
class RankSplit:
    """The division of a model over ranks."""

    tensor: int = 1
    pipeline: int = 1
    num_virtual: int = 1
    together: int = 1
    """The micro-batches that a virtual stage computes before the next one."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    replicas: int = 1
    is_sequence_parallel: bool = True

    @property
    def row_ranks(self) -> int:
        """The number of ranks that divide the rows of norms."""
        return self.context * (self.tensor if self.is_sequence_parallel else 1)


@dataclasses.dataclass(frozen=True)
class ParameterBytes:
    """The bytes that a rank keeps for a parameter."""

    weight: int = 2
    gradient: float = 4
    state: float = 12.0
    """Bytes of the optimizer's state, on the device and on the host."""
    offloaded: float = 0.0
    """The share of the optimizer's state that is on the host."""
    is_state_divided: bool = True
    """True if replicas divide the optimizer's state."""


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """The parts of a stage that are computed again in the backward pass."""

    modules: frozenset[str] = frozenset()
    """Megatron's names of the modules of each layer."""
    method: str = ""
    """`uniform` or `block`, if whole layers are."""
    num_layers: int = 1
    """With `uniform` the layers that are computed again together, with `block` those of a stage."""


@dataclasses.dataclass(frozen=True)
class Micro:
    tokens: int
    num_in_schedule: int


@dataclasses.dataclass(frozen=True)
class RankBytes:
    weights: float
    gradients: float
    optimizer: float
    frozen: float
    activations: float
    workspace: float
    publish: float

    @property
    def total(self) -> int:
        return round(sum(vars(self).values()))


_OF_TRAINED = ("weights", "gradients", "optimizer", "frozen", "activations")


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """The values that decide how much memory a rank takes, beside its micro-batches."""

    architecture: Architecture
    split: RankSplit = RankSplit()
    parameter: ParameterBytes = ParameterBytes()
    recomputed: Recomputed = Recomputed()
    num_frozen: int = 0
    is_frozen_offloaded: bool = False
    teachers: tuple[Architecture, ...] = ()
    critic: Architecture | None = None
    has_head: bool = False
    """Whether the critic is a head on the policy, which keeps its rows in float32 for its gradient."""
    of_critic: ParameterBytes = ParameterBytes()
    """The bytes of a parameter of the critic, which has no adapters."""
    keeps_old: bool = False
    """Whether later updates need models as they were at the start."""
    streams: bool = True
    """True if weights reach engines from device to device."""

    def estimate(self, micro: Micro) -> RankBytes:
        """Estimate the bytes of the stage that takes most, of the first and the last one."""
        stages = (0, self.split.pipeline - 1)
        return max((self._estimate_stage(micro, stage) for stage in stages), key=lambda one: one.total)

    def _estimate_stage(self, micro: Micro, stage: int) -> RankBytes:
        split, parameter = self.split, self.parameter
        is_last = stage == split.pipeline - 1
        layers, others, of_experts = self._count_stage(self.architecture)
        owned = others + of_experts
        if parameter.is_state_divided:
            ranks = split.replicas * split.context
            owned = others / ranks + of_experts / max(1, ranks * split.tensor / (split.expert * split.expert_tensor))
        weights = (others + of_experts) * parameter.weight
        kept, of_layer = self._count_kept(micro, layers)
        if is_last:
            # The final norm is not a part of any layer.
            kept += (
                micro.tokens / split.row_ranks * self.architecture.hidden_size * (10 if parameter.weight == 2 else 8)
            )
            kept += self.has_head * 4 * micro.tokens / split.context * self.architecture.hidden_size
        frozen, two_layers = self.num_frozen * weights, 2 * weights / layers if self.num_frozen else 0.0
        for teacher in self.teachers:
            of_layers, *of_teacher = self._count_stage(teacher)
            frozen += sum(of_teacher) * parameter.weight
            two_layers = max(two_layers, 2 * sum(of_teacher) * parameter.weight / of_layers)
        logits = micro.tokens / split.context * self.architecture.vocab_size / split.tensor * parameter.weight
        own = RankBytes(
            weights=weights,
            gradients=(others + of_experts) * parameter.gradient,
            optimizer=owned * parameter.state * (1 - parameter.offloaded),
            frozen=two_layers if self.is_frozen_offloaded else frozen,
            activations=count_chunks_in_flight(split, stage, micro.num_in_schedule) / split.num_virtual * kept,
            workspace=of_layer + (min(LOGITS, logits) if is_last else 0),
            publish=count_streamed(self.architecture, parameter.weight) if self.streams else 0,
        )
        if self.critic is None:
            return own
        critic = dataclasses.replace(
            self,
            architecture=self.critic,
            parameter=self.of_critic,
            critic=None,
            teachers=(),
            num_frozen=int(self.keeps_old),
        )._estimate_stage(micro, stage)
        both = {name: getattr(own, name) + getattr(critic, name) for name in _OF_TRAINED}
        return dataclasses.replace(own, **both)

    def _count_stage(self, architecture: Architecture) -> tuple[int, float, float]:
        """Count a model's layers in a stage, and this rank's parameters there, without and in experts."""
        size, split = count_parameters(architecture), self.split
        layers = -(-architecture.num_layers // split.pipeline)
        # A lone stage with a tied embedding has one copy of it; of several stages, each end has one.
        copies = 2 if split.pipeline == 1 and not architecture.tied_embeddings else 1
        others = (layers * size.of_layer + copies * size.of_vocabulary) / split.tensor
        return layers, others, layers * size.of_experts / (split.expert * split.expert_tensor)

    def _count_kept(self, micro: Micro, layers: int) -> tuple[float, float]:
        """Return the bytes that a stage keeps of a micro-batch, and those that one layer keeps for its backward pass.

        Layers that are computed again keep their inputs; of those that are computed together, one keeps its input.
        """
        recomputed, item = self.recomputed, self.parameter.weight
        of_layer = micro.tokens * count_kept_of_layer(self.architecture, item, self.split, recomputed.modules)
        of_input = micro.tokens / self.split.row_ranks * item * self.architecture.hidden_size
        if recomputed.method == "uniform":
            together = min(recomputed.num_layers, layers)
            return layers / together * of_input, together * of_layer
        whole = min(recomputed.num_layers, layers) if recomputed.method == "block" else 0
        return whole * of_input + (layers - whole) * of_layer, of_layer


def count_chunks_in_flight(split: RankSplit, stage: int, num_micro_batches: int) -> int:
    """Count the micro-batches, of one chunk each, that a stage keeps at once, since it runs ahead of later stages."""
    ahead, virtual = split.pipeline - stage - 1, split.num_virtual
    if virtual == 1:
        return min(ahead + 1, num_micro_batches)
    return min(2 * ahead + (virtual - 1) * split.together + 1, num_micro_batches * virtual)


def count_streamed(architecture: Architecture, item: int) -> int:
    """Count the bytes of a stream on rank 0: the buffers that are sent, and the tensors that the next is made of.

    Each ends with a tensor that may be the largest.
    """
    largest = architecture.hidden_size * max(architecture.vocab_size, architecture.ffn_hidden_size)
    return (NUM_BUFFERS + 1) * (BUFFER_BYTES + largest * item)


def count_kept_of_layer(
    architecture: Architecture, item: int, split: RankSplit, modules: frozenset[str] = frozenset()
) -> float:
    """Count the bytes that a layer of Megatron's own keeps for a token, with items of 2 or 4 bytes.

    Norms compute in float32: with items of 2 bytes they keep a wider copy. Of the `modules` that are computed again,
    only norms are taken off.
    """
    hidden = architecture.hidden_size
    of_norms = hidden * (2 * item if "layernorm" in modules else 22 if item == 2 else 24)
    of_attention = _count_kept_of_attention(architecture, item)
    experts = architecture.experts
    if experts is None:
        of_columns = 5 * item * architecture.ffn_hidden_size
        return of_norms / split.row_ranks + (of_attention + of_columns) / (split.tensor * split.context)
    of_experts = experts.num_active * item * (3 * hidden * split.expert_tensor + 5 * experts.ffn_hidden_size)
    of_experts += 4 * experts.num_experts
    of_columns = 5 * item * experts.shared_ffn_hidden_size
    return (of_norms + of_experts) / split.row_ranks + (of_attention + of_columns) / (split.tensor * split.context)


def _count_kept_of_attention(architecture: Architecture, item: int) -> float:
    """Count the bytes that attention keeps for a token: a mean over layers of full attention and linear ones."""
    heads = (architecture.num_attention_heads + architecture.num_query_groups) * architecture.kv_channels
    of_full = (3 * item + (8 if architecture.qk_layernorm else 0)) * heads
    one = architecture.linear
    if architecture.attention_gate:
        of_full += 2 * item * architecture.num_attention_heads * architecture.kv_channels
    if one is None:
        return of_full
    values = one.num_value_heads * one.value_head_dim
    # The first product, what the convolution makes of it, and the gated norm in float32.
    of_linear = one.num_key_heads * (one.columns_of_key_head + 3 * one.channels_of_key_head) * item + values * 16
    num_full, num_layers = architecture.num_full_layers, architecture.num_layers
    return (num_full * of_full + (num_layers - num_full) * of_linear) / num_layers


def read_rank_memory(look_up: LookUp, architecture: Architecture, replicas: int) -> RankMemory:
    """Return the values of a run's settings that decide a rank's memory."""
    is_sampled, rank = look_up("run.stage") in SAMPLED, look_up("lora.rank")
    parameter = of_critic = read_parameter_bytes(look_up)
    teachers = [*name_teachers(look_up("algorithm.teacher")).values()]
    teachers += [Path(word.partition("=")[2]) for word in look_up("algorithm.roles") or ()]
    if rank:
        # Adapters have about this share of the parameters of their layers, and nothing else is trained.
        share = min(1.0, 3 * rank / architecture.hidden_size)
        parameter = dataclasses.replace(parameter, gradient=share * parameter.gradient, state=share * parameter.state)
    return RankMemory(
        architecture=architecture,
        split=_read_split(look_up, architecture, replicas),
        parameter=parameter,
        recomputed=_read_recomputed(look_up),
        # Adapters leave their base to all roles.
        num_frozen=0 if rank else count_frozen(look_up, _count_updates(look_up) if is_sampled else 1),
        is_frozen_offloaded=bool(look_up("loop.frozen_offload")),
        critic=_read_critic(look_up, architecture) if is_sampled else None,
        has_head=is_sampled and look_up("algorithm.critic") == HEAD,
        of_critic=of_critic,
        keeps_old=_count_updates(look_up) > 1,
        teachers=tuple(read_architecture(folder, flag="--teacher") for folder in teachers) if is_sampled else (),
        streams=is_sampled and look_up("rollout.transport") != "shm",
    )


def _read_critic(look_up: LookUp, architecture: Architecture) -> Architecture | None:
    folder = look_up("algorithm.critic")
    # A head on the policy is a few thousand numbers.
    if folder in (None, HEAD):
        return None
    own = architecture if folder == "policy" else read_architecture(Path(folder), flag="--critic")
    # It has no output layer to speak of.
    return dataclasses.replace(own, tied_embeddings=True)


def count_frozen(look_up: LookUp, num_updates: int) -> int:
    """Count the models that a rank keeps next to the policy."""
    return has_reference(look_up) + keeps_old_policy(look_up, num_updates)


def has_reference(look_up: LookUp) -> bool:
    """Check whether the loss of a run needs a reference."""
    if look_up("run.stage") == "dpo":
        return PREFERENCES[look_up("preference.loss")].has_reference
    return look_up("run.stage") == "grpo" and bool(look_up("algorithm.kl_beta"))


def keeps_old_policy(look_up: LookUp, num_updates: int) -> bool:
    return num_updates > 1 and look_up("loop.tri_model") != "separate"


def _read_split(look_up: LookUp, architecture: Architecture, replicas: int) -> RankSplit:
    tensor = look_up("transformer.tensor_model_parallel_size")
    stages = look_up("transformer.pipeline_model_parallel_size")
    return RankSplit(
        tensor=tensor,
        pipeline=stages,
        num_virtual=_count_virtual(look_up, architecture, stages),
        together=look_up("transformer.microbatch_group_size_per_vp_stage") or stages,
        context=look_up("transformer.context_parallel_size"),
        expert=look_up("transformer.expert_model_parallel_size") or 1,
        expert_tensor=look_up("transformer.expert_tensor_parallel_size") or tensor,
        replicas=replicas,
        is_sequence_parallel=bool(look_up("transformer.sequence_parallel")) and tensor > 1,
    )


def _count_virtual(look_up: LookUp, architecture: Architecture, stages: int) -> int:
    count, layers = look_up("layout.num_virtual_stages"), look_up("layout.layers_per_virtual_stage")
    if layers:
        return max(1, architecture.num_layers // stages // int(layers))
    return count or 1


def _count_updates(look_up: LookUp) -> int:
    prompts, of_update = look_up("algorithm.prompts_per_step"), look_up("training.global_batch_size")
    if prompts is None or of_update is None:
        return 1
    return max(1, prompts * look_up("algorithm.group_size") // of_update)


def read_parameter_bytes(look_up: LookUp) -> ParameterBytes:
    """Return the bytes that a rank keeps for a parameter that it trains."""
    is_half = bool(look_up("transformer.bf16") or look_up("transformer.fp16"))
    num_moments = 1 if look_up("optimizer.optimizer") == "sgd" else 2
    state = 4 * (num_moments + is_half)
    if look_up("optimizer.use_precision_aware_optimizer"):
        # If the copy of the weights has two bytes, the weight itself is its upper half.
        names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")[: 1 + num_moments]
        dtypes = [look_up(f"optimizer.{name}") for name in names]
        state = sum(4 if dtype is None else dtype.itemsize for dtype in dtypes)
    fraction = look_up("optimizer.optimizer_offload_fraction")
    return ParameterBytes(
        weight=2 if is_half else 4,
        gradient=2 if is_half and look_up("ddp.grad_reduce_in_fp32") is False else 4,
        state=state,
        offloaded=(1.0 if fraction is None else fraction) if look_up("optimizer.optimizer_cpu_offload") else 0.0,
        is_state_divided=bool(look_up("ddp.use_distributed_optimizer")),
    )


def _read_recomputed(look_up: LookUp) -> Recomputed:
    granularity = look_up("transformer.recompute_granularity")
    if granularity == "full":
        method, count = look_up("transformer.recompute_method"), look_up("transformer.recompute_num_layers")
        return Recomputed(method=method or "", num_layers=count or 1)
    modules = look_up("transformer.recompute_modules") or () if granularity == "selective" else ()
    return Recomputed(modules=frozenset(modules))


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """The memory that an engine is given on each of its devices."""

    share: float
    """The share of the device that must be free when the engine starts."""
    cache_bytes: int
    """Bytes of keys and values."""


@dataclasses.dataclass(frozen=True)
class EngineNeeds:
    """The bytes that an engine needs on each of its devices."""

    weights: int
    work: int
    """Bytes of a step, of a publish, of captured graphs, and of the device's context."""
    response: int
    """Bytes of the keys and values of one response and its prompt, at full length."""
    num_responses: int
    """The number of responses that are sampled at once."""


@dataclasses.dataclass(frozen=True)
class SharedDevice:
    """A device's bytes, divided."""

    device: int
    counted: int
    """Bytes that a rank was counted to need."""
    rank: int
    """Bytes that the rank keeps, with what the count leaves out."""
    needs: EngineNeeds
    cache: int
    is_by_turns: bool = False

    @property
    def engine(self) -> int:
        return self.needs.weights + self.needs.work + self.cache

    @property
    def memory(self) -> EngineMemory:
        """The engine's part, as vLLM takes it."""
        return EngineMemory(share=math.ceil(1000 * self.engine / self.device) / 1000, cache_bytes=self.cache)

    def describe(self) -> str:
        needs, count = self.needs, self.cache // self.needs.response
        held = f"all {needs.num_responses}" if count >= needs.num_responses else f"{count} of {needs.num_responses}"
        return (
            f"device memory: {_gib(self.device)} GiB, {'by turns' if self.is_by_turns else 'of it'} {_gib(self.rank)} "
            f"for a rank ({_gib(self.counted)} counted) and {_gib(self.engine)} for an engine: weights "
            f"{_gib(needs.weights)}, work {_gib(needs.work)}, cache {_gib(self.cache)}, which holds {held} responses "
            "at full length"
        )


def find_slot_rank(rank: int) -> int:
    """Return the rank of vLLM's slot for adapters of this rank; 0 for none."""
    return next(size for size in (0, *LORA_RANKS) if size >= rank)


def count_needs(
    architecture: Architecture,
    dtype: str,
    tensor_parallel_size: int,
    max_num_seqs: int,
    max_model_len: int,
    lora_rank: int = 0,
) -> EngineNeeds:
    """Count the bytes that an engine needs on each of its devices."""
    size, item = tensor_parallel_size, ITEM_BYTES[dtype]
    specs = Mapping(architecture).manifest()
    tensors = [spec.num_elements for spec in specs]
    # Every matrix has a slot, of which workers divide only some factors.
    slots = find_slot_rank(lora_rank) * sum(sum(spec.shape) for spec in specs if len(spec.shape) == 2)
    experts = architecture.experts
    columns = architecture.ffn_hidden_size
    if experts:
        columns = experts.num_active * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
    step = _STEP_TOKENS * (4 * architecture.hidden_size + 3 * math.ceil(columns / size)) * item
    logits = _LOGITS_COPIES * max_num_seqs * architecture.vocab_size * ITEM_BYTES["float32"]
    # vLLM loads a layer into new memory before it copies the layer, and each tensor comes in a precision of its own.
    publish = max(tensors) * ITEM_BYTES["float32"] + math.ceil(_count_largest_layer(specs) / size) * item
    channels = architecture.cached_channels
    if architecture.latents is None:
        channels = channels // architecture.num_query_groups * max(1, architecture.num_query_groups // size)
    of_token = architecture.num_full_layers * channels * item
    return EngineNeeds(
        weights=(math.ceil(sum(tensors) / size) + slots) * item,
        work=_CONTEXT + _GRAPHS + _DIGESTS + step + logits + publish,
        response=math.ceil(max_model_len / _BLOCK_TOKENS) * _BLOCK_TOKENS * of_token
        + _count_states(architecture, size),
        num_responses=max_num_seqs,
    )


def read_engine_needs(look_up: LookUp, architecture: Architecture) -> EngineNeeds:
    return count_needs(
        architecture,
        look_up("rollout.dtype") or architecture.dtype,
        look_up("rollout.tensor_parallel_size"),
        look_up("rollout.max_num_seqs"),
        look_up("rollout.max_model_len") or look_up("training.seq_length"),
        look_up("rollout.lora_rank") or (look_up("lora.rank") if look_up("publish.lora") == "adapter" else 0),
    )


def _count_largest_layer(specs: Sequence[TensorSpec]) -> int:
    """Count the numbers of the largest layer that vLLM loads at once: all experts of a block are one."""
    layers: collections.Counter[str] = collections.Counter()
    for spec in specs:
        block, is_expert, _ = spec.name.partition(".experts.")
        layers[block if is_expert else spec.name.rsplit(".", 2)[0]] += spec.num_elements
    return max(layers.values())


def _count_states(architecture: Architecture, size: int) -> int:
    """Count the bytes of a response's states in linear layers, with the rows that their convolutions reach back to."""
    one = architecture.linear
    if one is None:
        return 0
    state = one.num_value_heads * one.key_head_dim * one.value_head_dim
    rows = one.num_key_heads * one.channels_of_key_head * (one.window - 1)
    num_layers = architecture.num_layers - architecture.num_full_layers
    return num_layers * math.ceil((state + rows) / size) * ITEM_BYTES["float32"]


def divide(device: int, counted: int, needs: EngineNeeds) -> SharedDevice:
    """Divide a device between a rank, counted to need `counted` bytes, and an engine; raise a UsageError if it cannot.

    vLLM keeps one block for itself; the cache has room for it.
    """
    rank = math.ceil(counted * (1 + _UNCOUNTED)) + _CONTEXT
    room = math.floor(device * (1 - _RESERVE)) - rank - needs.weights - needs.work
    if room < needs.response:
        raise UsageError(_describe_lack(device, rank, counted, needs))
    return SharedDevice(device, counted, rank, needs, min(room, (needs.num_responses + 1) * needs.response))


def take_turns(device: int, counted: int, needs: EngineNeeds) -> SharedDevice:
    """Give a device to a rank and an engine by turns; raise a UsageError if either does not fit."""
    rank, usable = math.ceil(counted * (1 + _UNCOUNTED)) + _CONTEXT, math.floor(device * (1 - _RESERVE))
    room = usable - _LEFT_BY_RANK - needs.weights - needs.work
    if room < needs.response or rank + _LEFT_BY_ENGINE > usable:
        raise UsageError(_describe_lack(device, rank, counted, needs))
    return SharedDevice(device, counted, rank, needs, min(room, (needs.num_responses + 1) * needs.response), True)


def count_room_beside_sleeper(device: int) -> int:
    """Return the bytes that a rank may be counted to need while the engine of its device sleeps."""
    return math.floor((device * (1 - _RESERVE) - _CONTEXT - _LEFT_BY_ENGINE) / (1 + _UNCOUNTED))


def count_room(device: int, fixed: int, needs: EngineNeeds | None = None) -> int:
    """Return the bytes that a rank of such a device may be counted to need, activations included.

    An engine that shares the device keeps its weights and work. Of what then remains beside the rank's `fixed` bytes,
    the engine's cache gets half, or less if all responses fit into less.
    """
    room = math.floor(device * (1 - _RESERVE)) - _CONTEXT
    if needs is not None:
        room -= needs.weights + needs.work
        half = (room - math.ceil(fixed * (1 + _UNCOUNTED))) // 2
        room -= max(needs.response, min(half, (needs.num_responses + 1) * needs.response))
    return math.floor(room / (1 + _UNCOUNTED))


def _describe_lack(device: int, rank: int, counted: int, needs: EngineNeeds) -> str:
    least = needs.weights + needs.work + needs.response
    return (
        f"{FLAG_OF_SHARING} does not fit a device of {_gib(device)} GiB: a rank needs {_gib(rank)} ({_gib(counted)} "
        f"counted) and an engine at least {_gib(least)}: weights {_gib(needs.weights)}, work {_gib(needs.work)}, "
        f"{_gib(needs.response)} for one response. Lower --micro-batch-size, --seq-length or --rollout-max-num-seqs, "
        f"give engines devices of their own, or divide the memory yourself: {DIVIDED_BY_USER}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
