"""Formulas that estimate the memory of a rank on its device; `megatron-rl doctor --fit` counts it exactly.

Megatron's own layers are estimated, with attention as a fused kernel; fused layers keep less.
"""

import dataclasses

from megatron_rl.types import Architecture

# The largest block of logits, which its gradient replaces.
_LOGITS = 1 << 29
BUFFER_BYTES, NUM_BUFFERS = 1 << 28, 2
"""The size and the number of the buffers in which tensors are streamed to engines; the last tensor may exceed it."""


@dataclasses.dataclass(frozen=True)
class ParameterCounts:
    """Counts of a model's parameters."""

    of_layer: int
    """Parameters of a layer that every token passes, attention included; norms are left out.

    Counts of a layer are means over all layers, of which the first ones may have no experts.
    """
    of_experts: int
    """Parameters of all experts of a layer."""
    of_vocabulary: int
    """Parameters of the output layer; the embedding has as many again unless it is tied."""
    num_layers: int
    is_tied: bool

    @property
    def total(self) -> int:
        copies = 1 if self.is_tied else 2
        return self.num_layers * (self.of_layer + self.of_experts) + copies * self.of_vocabulary


def count_parameters(architecture: Architecture) -> ParameterCounts:
    """Count a model's parameters."""
    hidden = architecture.hidden_size
    attention = _count_attention(architecture)
    linear, num_full = architecture.linear, architecture.num_full_layers
    if linear is not None:
        values = linear.num_value_heads * linear.value_head_dim
        of_linear = hidden * (linear.num_key_heads * linear.columns_of_key_head + values)
        attention = (num_full * attention + (architecture.num_layers - num_full) * of_linear) // architecture.num_layers
    experts, num_layers = architecture.experts, architecture.num_layers
    num_dense = experts.num_dense_layers if experts else num_layers
    of_expert = 3 * hidden * experts.ffn_hidden_size if experts else 0
    of_all = hidden * (experts.num_experts + 3 * experts.shared_ffn_hidden_size) if experts else 0

    def average(of_dense_layer: int, of_other_layer: int) -> int:
        return (num_dense * of_dense_layer + (num_layers - num_dense) * of_other_layer) // num_layers

    return ParameterCounts(
        of_layer=attention + average(3 * hidden * architecture.ffn_hidden_size, of_all),
        of_experts=average(0, of_expert * experts.num_experts) if experts else 0,
        of_vocabulary=hidden * architecture.vocab_size,
        num_layers=num_layers,
        is_tied=architecture.tied_embeddings,
    )


def _count_attention(architecture: Architecture) -> int:
    hidden, heads, latents = architecture.hidden_size, architecture.num_attention_heads, architecture.latents
    queries = heads * architecture.kv_channels
    if latents is None:
        groups = architecture.num_query_groups * architecture.kv_channels
        return hidden * ((3 if architecture.attention_gate else 2) * queries + 2 * groups)
    of_queries = hidden * queries
    if latents.query_rank is not None:
        of_queries = latents.query_rank * (hidden + queries)
    of_keys = hidden * (latents.kv_rank + latents.rotary_dim)
    of_keys += latents.kv_rank * heads * (latents.plain_dim + latents.value_dim)
    return of_queries + of_keys + hidden * heads * latents.value_dim


@dataclasses.dataclass(frozen=True)
class RankSplit:
    """The division of a model over ranks."""

    tensor: int = 1
    pipeline: int = 1
    num_virtual: int = 1
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
    """Bytes of the optimizer's state on the device."""
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
    """The largest micro-batch."""

    tokens: int
    num_in_schedule: int


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """The bytes of a rank on its device, by purpose."""

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


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """The values that decide how much memory a rank takes, beside its micro-batches."""

    architecture: Architecture
    split: RankSplit = RankSplit()
    parameter: ParameterBytes = ParameterBytes()
    recomputed: Recomputed = Recomputed()
    num_frozen: int = 0
    is_frozen_offloaded: bool = False
    streams: bool = True
    """True if weights reach engines from device to device."""

    def estimate(self, micro: Micro) -> RankBytes:
        """Estimate the bytes of the stage that takes most, of the first and the last one."""
        stages = (0, self.split.pipeline - 1)
        return max((self._estimate_stage(micro, stage) for stage in stages), key=lambda one: one.total)

    def _estimate_stage(self, micro: Micro, stage: int) -> RankBytes:
        size, split, parameter = count_parameters(self.architecture), self.split, self.parameter
        is_last = stage == split.pipeline - 1
        layers = -(-size.num_layers // split.pipeline)
        # A lone stage with a tied embedding has one copy of it; of several stages, each end has one.
        copies = 2 if split.pipeline == 1 and not size.is_tied else 1
        of_experts = layers * size.of_experts / (split.expert * split.expert_tensor)
        others = (layers * size.of_layer + copies * size.of_vocabulary) / split.tensor
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
        two_layers = 2 * weights / layers if self.num_frozen else 0
        logits = micro.tokens / split.context * self.architecture.vocab_size / split.tensor * parameter.weight
        return RankBytes(
            weights=weights,
            gradients=(others + of_experts) * parameter.gradient,
            optimizer=owned * parameter.state,
            frozen=two_layers if self.is_frozen_offloaded else self.num_frozen * weights,
            activations=self._count_in_flight(micro, stage) * kept,
            workspace=of_layer + (min(_LOGITS, logits) if is_last else 0),
            publish=count_streamed(self.architecture, parameter.weight) if self.streams else 0,
        )

    def _count_in_flight(self, micro: Micro, stage: int) -> float:
        """Count the micro-batches that a stage keeps at once, since it runs ahead of later stages."""
        split, virtual = self.split, self.split.num_virtual
        ahead = split.pipeline - stage - 1
        if virtual == 1:
            return min(ahead + 1, micro.num_in_schedule)
        chunks = min(2 * ahead + (virtual - 1) * split.pipeline + 1, micro.num_in_schedule * virtual)
        return chunks / virtual

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
