"""Value types that several packages share. Nothing here needs torch."""

import dataclasses
import enum

MKL_MODE = {"MKL_CBWR": "AUTO,STRICT"}
"""The variable of MKL's reproducible mode: sums of a product in fp32 have one order, with any number of threads."""

SAMPLED = ("grpo", "serve")
"""The stages with engines, which sample from what is trained."""


class RopeKind(enum.StrEnum):
    """The supported ways to scale rotary frequencies, under Hugging Face's names."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary position embedding: its base, and the scaling of its frequencies."""

    base: float = 10000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    original_max_positions: int | None = None
    rotary_fraction: float = 1.0
    """The part of a head's dimensions that rotates: its first ones."""
    interleaved: bool = False
    """True if neighbors rotate as a pair, in place of dimensions half the rotating part from each other."""
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    # yarn of multi-latent attention
    mscale: float | None = None
    mscale_all_dim: float | None = None


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a mixture-of-experts model."""

    num_experts: int
    num_active: int
    ffn_hidden_size: int
    normalize_weights: bool = True
    """Whether the weights of the chosen experts are scaled to sum to one."""
    score: str = "softmax"
    """The function of an expert's score: "softmax" over all experts, or "sigmoid" of its own logit, in float32."""
    has_bias: bool = False
    """Whether a stored bias is added to each score to choose experts; their weights are without it."""
    scaling_factor: float = 1.0
    """The factor of the chosen experts' weights."""
    num_groups: int = 1
    num_active_groups: int = 1
    """Number of groups that a token's experts are chosen from: those with the largest sums of two scores. With softmax,
    those with the largest score."""
    num_dense_layers: int = 0
    """Number of first layers that have an MLP in place of experts."""
    shared_ffn_hidden_size: int = 0
    """Width of the expert that every token passes; 0 if there is none."""
    has_shared_gate: bool = False
    """Whether each token weighs the shared expert's output by a sigmoid."""


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """The linear layers of a model, which are gated delta nets, among layers of full attention."""

    num_key_heads: int
    num_value_heads: int
    """Number of value heads: a multiple of the key heads, each of which has as many in a row."""
    key_head_dim: int
    value_head_dim: int
    window: int = 4
    """Number of tokens that the convolution before the rule reads."""
    full_interval: int = 4
    """Number of layers from one layer of full attention to the next; the last of each run is one."""

    @property
    def channels_of_key_head(self) -> int:
        """Number of channels of the convolution that a key head has: query, key, and values of its value heads."""
        return 2 * self.key_head_dim + self.num_value_heads // self.num_key_heads * self.value_head_dim

    @property
    def columns_of_key_head(self) -> int:
        """Number of columns of a key head in the first product: channels, and for each value head two and a gate."""
        return self.channels_of_key_head + self.num_value_heads // self.num_key_heads * (self.value_head_dim + 2)


@dataclasses.dataclass(frozen=True)
class Latents:
    """The widths of multi-latent attention, whose keys and values are products of one narrow row of a token."""

    kv_rank: int
    """Width of the row that all keys and values of a token are products of."""
    plain_dim: int
    """Width of the part of a head of queries and keys that does not rotate."""
    rotary_dim: int
    """Width of the part that rotates, whose key is the same in all heads."""
    value_dim: int
    """Width of a head of values."""
    query_rank: int | None = None
    """Width of the row that all queries of a token are products of; None if they are products of its hidden state."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The architecture of a model, independent of sharding, training and storage.

    A family reads it from a Hugging Face config.json and writes it back; Megatron's flags describe the same properties.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float = 1e-6
    rope: Rope = Rope()
    tied_embeddings: bool = False
    is_critic: bool = False
    """True: the output layer is a critic's, with one number for each token, and no part of a Hugging Face folder."""
    qk_layernorm: bool = False
    norms_join_heads: bool = False
    """True: the queries of all heads are normalized together, and likewise the keys, in place of each head alone."""
    qkv_bias: bool = False
    linear_bias: bool = False
    experts: Experts | None = None
    linear: LinearAttention | None = None
    """The layers without full attention; None if all layers attend fully."""
    attention_gate: bool = False
    """Whether attention's output is multiplied by a sigmoid, which has its own part of the queries' projection."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 plus their weight; the norms within linear layers never do."""
    latents: Latents | None = None
    """None if keys and values are products of a token's hidden state; `kv_channels` is the width of a key's head."""
    sliding_window: int | None = None
    """Number of tokens that attention reaches back; None for all of them."""
    full_layers: tuple[int, ...] = ()
    """The layers, counted from zero, whose attention reaches all tokens in spite of `sliding_window`."""
    local_rope: Rope | None = None
    """The rope of layers with a window; None if it is that of the others."""
    scale_width: int | None = None
    """The number whose inverse square root multiplies scores of attention; None for the width of a head."""
    activation: str = "silu"
    """The function of an MLP's gate: "silu", "gelu_tanh", or "clamped_swiglu", which adds 1 to the other part too."""
    activation_clamp: float | None = None
    """The largest value of an MLP's gate, and the largest absolute value of its other part; None for any."""
    has_sinks: bool = False
    """True: each head of attention has a sink."""
    has_output_norms: bool = False
    """Whether the outputs of attention and of the MLP are normalized before they are added to the residual."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size."""
    dtype: str = "float32"
    """Dtype of the stored weights: "float32", "bfloat16" or "float16"."""

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a sequence that engines take."""
        # Models with two ropes state the length that the factor has already lengthened.
        is_scaled = self.rope.kind is RopeKind.LINEAR and self.local_rope is None
        return int(self.max_position_embeddings * (self.rope.factor if is_scaled else 1.0))

    def find_window(self, layer: int) -> int | None:
        """Return the window of a layer, counted from zero; None if its attention reaches all tokens."""
        return None if layer in self.full_layers else self.sliding_window

    @property
    def windows(self) -> list[int | None]:
        return list(dict.fromkeys(map(self.find_window, range(self.num_layers))))

    def is_local(self, layer: int) -> bool:
        """Check whether a layer, counted from zero, has the rope of layers with a window, which is one of its own."""
        return self.local_rope is not None and self.find_window(layer) is not None

    def find_rope(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope is not None and self.is_local(layer) else self.rope

    def has_experts(self, layer: int) -> bool:
        """Check whether a layer, counted from zero, has experts; it has an MLP otherwise."""
        return self.experts is not None and layer >= self.experts.num_dense_layers

    def is_linear(self, layer: int) -> bool:
        """Check whether a layer, counted from zero, is linear; it attends fully otherwise."""
        return self.linear is not None and (layer + 1) % self.linear.full_interval != 0

    @property
    def num_full_layers(self) -> int:
        """Number of layers that attend fully."""
        return self.num_layers - sum(map(self.is_linear, range(self.num_layers)))

    @property
    def value_channels(self) -> int:
        """Width of a head of values."""
        return self.kv_channels if self.latents is None else self.latents.value_dim

    @property
    def rope_channels(self) -> int:
        """Width of the part of a head that rope is defined for."""
        return self.kv_channels if self.latents is None else self.latents.rotary_dim

    @property
    def cached_channels(self) -> int:
        """Numbers that a layer of an engine keeps for a token: keys and values, or what they are products of."""
        if self.latents is not None:
            return self.latents.kv_rank + self.latents.rotary_dim
        return 2 * self.num_query_groups * self.kv_channels

    @property
    def num_expert_layers(self) -> int:
        return sum(map(self.has_experts, range(self.num_layers)))


@dataclasses.dataclass(frozen=True)
class ParallelSizes:
    """The number of ranks that divide each dimension; the remaining factor is the data-parallel size."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def model(self) -> int:
        """Number of ranks of one data-parallel replica."""
        return self.tensor * self.pipeline * self.context


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The divergence of a policy's distribution P from a teacher's distribution Q, for each token."""

    kind: str
    """`reverse`: KL(P, Q). `forward`: KL(Q, P). `jsd`: the weighted mean of both from their mixture."""
    top_k: int | None = None
    """The number of the teacher's likeliest tokens that count singly, while others count together; None if all do."""
    mixture: float = 0.5
    """The teacher's weight in the mixture of `jsd`, and of its divergence from the mixture."""
