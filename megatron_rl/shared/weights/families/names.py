"""The names of a family's tensors, and their splits over ranks.

A family's table of names is a tuple of `Name`s; most families combine the blocks below. `{layer}` and `{expert}` stand
for global numbers, counted from zero.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from megatron_rl.types import Architecture


class Split(enum.Enum):
    """The layout of the sources in the parameter, and the part of it that a tensor-parallel rank holds."""

    WHOLE = "every rank holds all of it"
    ROWS = "rows of the one source are divided over ranks"
    COLUMNS = "columns of the one source are divided over ranks"
    VOCABULARY = "rows are divided over ranks after padding to a multiple that Megatron chooses"
    QKV = "for each group its queries, its key, its value; groups are divided over ranks"
    GATE_UP = "each rank holds its rows of the gate, then its rows of the up projection"
    KEY_HEADS = "for each key head of a linear layer its rows of each source; key heads are divided over ranks"


class Layers(enum.Enum):
    ALL = "all layers"
    DENSE = "layers with an MLP"
    SPARSE = "layers with experts"
    FULL = "layers of full attention"
    LINEAR = "linear layers"

    def contain(self, architecture: Architecture, layer: int) -> bool:
        """Check whether a layer, counted from zero, is one of these."""
        if self in (Layers.FULL, Layers.LINEAR):
            return architecture.is_linear(layer) is (self is Layers.LINEAR)
        return self is Layers.ALL or architecture.has_experts(layer) is (self is Layers.SPARSE)


def _always(_: Architecture) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Name:
    """One Megatron parameter and the tensors that it consists of."""

    parameters: tuple[str, ...]
    """The parameter's possible names: Megatron's local layer spec, TransformerEngine's fused one."""
    sources: tuple[str, ...]
    split: Split
    when: Callable[[Architecture], bool] = _always
    exported: bool = True
    """Whether this parameter exports the tensors; False for a copy, since another parameter exports them."""
    layers: Layers = Layers.ALL
    dtype: str | None = None
    """The dtype in which the tensors are stored and published; None for that of the model."""


_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "model.layers.{layer}"


def _linear(parameter: str, sources: tuple[str, ...], split: Split, kind: str = "weight", **options: Any) -> Name:
    return Name(
        (f"{_LAYER}.{parameter}.{kind}",), tuple(f"{_HF_LAYER}.{source}.{kind}" for source in sources), split, **options
    )


def has_query_rank(architecture: Architecture) -> bool:
    """Check whether queries are products of a narrow row."""
    return architecture.latents is not None and architecture.latents.query_rank is not None


def _has_norm_of_each_head(architecture: Architecture) -> bool:
    return architecture.qk_layernorm and not architecture.norms_join_heads


def _latent_norm(kind: str, source: str, **options: Any) -> Name:
    attention = f"{_LAYER}.self_attention"
    parameters = (f"{attention}.{kind}_layernorm.weight", f"{attention}.linear_{kind}_up_proj.layer_norm_weight")
    return Name(parameters, (f"{_HF_LAYER}.{source}.weight",), Split.WHOLE, **options)


_QKV_SOURCES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP_SOURCES = ("mlp.gate_proj", "mlp.up_proj")

_OUTER = (
    Name(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Split.VOCABULARY),
    Name(("decoder.final_layernorm.weight",), ("model.norm.weight",), Split.WHOLE),
    Name(("output_layer.weight",), ("lm_head.weight",), Split.VOCABULARY, when=lambda a: not a.tied_embeddings),
    # With tied embeddings and several pipeline stages, the last stage holds a copy of the first stage's embedding.
    Name(
        ("output_layer.weight",),
        ("model.embed_tokens.weight",),
        Split.VOCABULARY,
        when=lambda a: a.tied_embeddings,
        exported=False,
    ),
)


def _norms(mlp: str) -> tuple[Name, ...]:
    """Name the norms before attention and before the MLP, of which the second is stored as `mlp`."""
    return (
        Name(
            (f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight"),
            (f"{_HF_LAYER}.input_layernorm.weight",),
            Split.WHOLE,
        ),
        Name(
            (f"{_LAYER}.pre_mlp_layernorm.weight", f"{_LAYER}.mlp.linear_fc1.layer_norm_weight"),
            (f"{_HF_LAYER}.{mlp}.weight",),
            Split.WHOLE,
        ),
    )


STEM = (_OUTER[0], *_norms("post_attention_layernorm"), *_OUTER[1:])
STEM_WITH_OUTPUT_NORMS = (
    _OUTER[0],
    *_norms("pre_feedforward_layernorm"),
    Name((f"{_LAYER}.self_attn_bda.norm.weight",), (f"{_HF_LAYER}.post_attention_layernorm.weight",), Split.WHOLE),
    Name((f"{_LAYER}.mlp_bda.norm.weight",), (f"{_HF_LAYER}.post_feedforward_layernorm.weight",), Split.WHOLE),
    *_OUTER[1:],
)

ATTENTION = tuple(
    dataclasses.replace(name, layers=Layers.FULL)
    for name in (
        _linear("self_attention.linear_qkv", _QKV_SOURCES, Split.QKV),
        _linear(
            "self_attention.linear_qkv", _QKV_SOURCES, Split.QKV, "bias", when=lambda a: a.qkv_bias or a.linear_bias
        ),
        _linear("self_attention.linear_proj", ("self_attn.o_proj",), Split.COLUMNS),
        _linear("self_attention.linear_proj", ("self_attn.o_proj",), Split.WHOLE, "bias", when=lambda a: a.linear_bias),
        _linear("self_attention.q_layernorm", ("self_attn.q_norm",), Split.WHOLE, when=_has_norm_of_each_head),
        _linear("self_attention.k_layernorm", ("self_attn.k_norm",), Split.WHOLE, when=_has_norm_of_each_head),
        _linear("self_attention.q_norm", ("self_attn.q_norm",), Split.ROWS, when=lambda a: a.norms_join_heads),
        _linear("self_attention.k_norm", ("self_attn.k_norm",), Split.ROWS, when=lambda a: a.norms_join_heads),
    )
)


def linear_attention(*projections: str) -> tuple[Name, ...]:
    """Name the linear layers, whose inputs come from `projections`: of all parts of key heads together, or of each."""
    ours, theirs = f"{_LAYER}.self_attention", f"{_HF_LAYER}.linear_attn"
    sources = tuple(f"{theirs}.{projection}.weight" for projection in projections)
    return (
        Name((f"{ours}.in_proj.weight",), sources, Split.KEY_HEADS, layers=Layers.LINEAR),
        Name((f"{ours}.conv_weight",), (f"{theirs}.conv1d.weight",), Split.KEY_HEADS, layers=Layers.LINEAR),
        Name((f"{ours}.A_log",), (f"{theirs}.A_log",), Split.ROWS, layers=Layers.LINEAR),
        Name((f"{ours}.dt_bias",), (f"{theirs}.dt_bias",), Split.ROWS, layers=Layers.LINEAR),
        Name((f"{ours}.norm_weight",), (f"{theirs}.norm.weight",), Split.WHOLE, layers=Layers.LINEAR),
        Name((f"{ours}.out_proj.weight",), (f"{theirs}.out_proj.weight",), Split.COLUMNS, layers=Layers.LINEAR),
    )


LATENT_ATTENTION = (
    _linear("self_attention.linear_q_proj", ("self_attn.q_proj",), Split.ROWS, when=lambda a: not has_query_rank(a)),
    _linear("self_attention.linear_q_down_proj", ("self_attn.q_a_proj",), Split.ROWS, when=has_query_rank),
    _latent_norm("q", "self_attn.q_a_layernorm", when=has_query_rank),
    _linear("self_attention.linear_q_up_proj", ("self_attn.q_b_proj",), Split.ROWS, when=has_query_rank),
    _linear("self_attention.linear_kv_down_proj", ("self_attn.kv_a_proj_with_mqa",), Split.ROWS),
    _latent_norm("kv", "self_attn.kv_a_layernorm"),
    _linear("self_attention.linear_kv_up_proj", ("self_attn.kv_b_proj",), Split.ROWS),
    _linear("self_attention.linear_proj", ("self_attn.o_proj",), Split.COLUMNS),
)

DENSE_MLP = (
    _linear("mlp.linear_fc1", _GATE_UP_SOURCES, Split.GATE_UP, layers=Layers.DENSE),
    _linear(
        "mlp.linear_fc1", _GATE_UP_SOURCES, Split.GATE_UP, "bias", when=lambda a: a.linear_bias, layers=Layers.DENSE
    ),
    _linear("mlp.linear_fc2", ("mlp.down_proj",), Split.COLUMNS, layers=Layers.DENSE),
    _linear(
        "mlp.linear_fc2", ("mlp.down_proj",), Split.WHOLE, "bias", when=lambda a: a.linear_bias, layers=Layers.DENSE
    ),
)


SINKS = (
    Name(
        (f"{_LAYER}.self_attention.core_attention.softmax_offset",), (f"{_HF_LAYER}.self_attn.sinks",), Split.ROWS,
        when=lambda a: a.has_sinks,
    ),
)  # fmt: skip


def _expert(
    block: str, linear: str, sources: tuple[str, ...], split: Split, kind: str = "weight", **options: Any
) -> Name:
    experts = f"{_LAYER}.mlp.experts"
    parameters = (f"{experts}.local_experts.{{expert}}.{linear}.{kind}", f"{experts}.{linear}.{kind}{{expert}}")
    names = tuple(f"{_HF_LAYER}.{block}.experts.{{expert}}.{source}.{kind}" for source in sources)
    return Name(parameters, names, split, layers=Layers.SPARSE, **options)


def experts_mlp(block: str, gate: str, up: str, down: str, router: str = "gate") -> tuple[Name, ...]:
    """Name the router and the experts, which are stored under `block`; each expert has its own tensors."""
    routers, sparse = (f"{block}.{router}",), Layers.SPARSE
    return (
        _linear("mlp.router", routers, Split.WHOLE, layers=sparse),
        _linear("mlp.router", routers, Split.WHOLE, "bias", when=lambda a: a.linear_bias, layers=sparse),
        _expert(block, "linear_fc1", (gate, up), Split.GATE_UP, "bias", when=lambda a: a.linear_bias),
        _expert(block, "linear_fc2", (down,), Split.WHOLE, "bias", when=lambda a: a.linear_bias),
        _expert(block, "linear_fc1", (gate, up), Split.GATE_UP),
        _expert(block, "linear_fc2", (down,), Split.COLUMNS),
    )


def router_bias(source: str) -> tuple[Name, ...]:
    """Name the bias that chooses experts, which is stored in float32 in models of any dtype."""
    return (
        Name(
            (f"{_LAYER}.mlp.router.expert_bias",),
            (f"{_HF_LAYER}.{source}",),
            Split.WHOLE,
            when=lambda a: a.experts is not None and a.experts.has_bias,
            layers=Layers.SPARSE,
            dtype="float32",
        ),
    )


def shared_expert(block: str, gate: str | None = None) -> tuple[Name, ...]:
    """Name the expert that every token passes, which is stored under `block`, and the `gate` of its output."""
    shared, sources = "mlp.shared_experts", tuple(f"{block}.{name}_proj" for name in ("gate", "up", "down"))
    names = (
        _linear(f"{shared}.linear_fc1", sources[:2], Split.GATE_UP, layers=Layers.SPARSE),
        _linear(f"{shared}.linear_fc2", sources[2:], Split.COLUMNS, layers=Layers.SPARSE),
    )
    if gate is None:
        return names
    weight = Name(
        (f"{_LAYER}.{shared}.gate_weight",), (f"{_HF_LAYER}.{gate}.weight",), Split.WHOLE, layers=Layers.SPARSE
    )
    return (*names, weight)
