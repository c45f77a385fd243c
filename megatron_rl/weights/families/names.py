"""Which Hugging Face tensors make which Megatron parameter, and how the parameter is split over ranks.

A family's table of names is a tuple of `Name`s; most families choose from the blocks below. `{layer}` and `{expert}`
stand for global numbers, counted from zero.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from megatron_rl.types import Architecture


class Split(enum.Enum):
    """How the sources are laid out in the parameter, and which part of it a tensor-parallel rank holds."""

    WHOLE = "every rank holds all of it"
    ROWS = "rows of the one source are divided over ranks"
    COLUMNS = "columns of the one source are divided over ranks"
    VOCABULARY = "rows are divided over ranks after padding to a multiple that Megatron chooses"
    QKV = "for each group its queries, its key, its value; groups are divided over ranks"
    GATE_UP = "each rank holds its rows of the gate, then its rows of the up projection"


def _always(_: Architecture) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Name:
    """One Megatron parameter and the tensors it is made of."""

    parameters: tuple[str, ...]
    """The parameter's possible names: Megatron's local layer spec, TransformerEngine's fused one."""
    sources: tuple[str, ...]
    split: Split
    when: Callable[[Architecture], bool] = _always
    exported: bool = True
    """False for a copy: the tensor is exported from another parameter."""


_LAYER = "decoder.layers.{layer}"
_HF_LAYER = "model.layers.{layer}"


def _linear(parameter: str, sources: tuple[str, ...], split: Split, kind: str = "weight", **options: Any) -> Name:
    return Name(
        (f"{_LAYER}.{parameter}.{kind}",), tuple(f"{_HF_LAYER}.{source}.{kind}" for source in sources), split, **options
    )


_QKV_SOURCES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP_SOURCES = ("mlp.gate_proj", "mlp.up_proj")

STEM = (
    Name(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Split.VOCABULARY),
    Name(
        (f"{_LAYER}.input_layernorm.weight", f"{_LAYER}.self_attention.linear_qkv.layer_norm_weight"),
        (f"{_HF_LAYER}.input_layernorm.weight",),
        Split.WHOLE,
    ),
    Name(
        (f"{_LAYER}.pre_mlp_layernorm.weight", f"{_LAYER}.mlp.linear_fc1.layer_norm_weight"),
        (f"{_HF_LAYER}.post_attention_layernorm.weight",),
        Split.WHOLE,
    ),
    Name(("decoder.final_layernorm.weight",), ("model.norm.weight",), Split.WHOLE),
    Name(("output_layer.weight",), ("lm_head.weight",), Split.VOCABULARY, when=lambda a: not a.tied_embeddings),
    # With tied embeddings and more than one pipeline stage the last stage holds a copy of the first one's embedding.
    Name(
        ("output_layer.weight",),
        ("model.embed_tokens.weight",),
        Split.VOCABULARY,
        when=lambda a: a.tied_embeddings,
        exported=False,
    ),
)

ATTENTION = (
    _linear("self_attention.linear_qkv", _QKV_SOURCES, Split.QKV),
    _linear("self_attention.linear_qkv", _QKV_SOURCES, Split.QKV, "bias", when=lambda a: a.qkv_bias or a.linear_bias),
    _linear("self_attention.linear_proj", ("self_attn.o_proj",), Split.COLUMNS),
    _linear("self_attention.linear_proj", ("self_attn.o_proj",), Split.WHOLE, "bias", when=lambda a: a.linear_bias),
    _linear("self_attention.q_layernorm", ("self_attn.q_norm",), Split.WHOLE, when=lambda a: a.qk_layernorm),
    _linear("self_attention.k_layernorm", ("self_attn.k_norm",), Split.WHOLE, when=lambda a: a.qk_layernorm),
)

DENSE_MLP = (
    _linear("mlp.linear_fc1", _GATE_UP_SOURCES, Split.GATE_UP),
    _linear("mlp.linear_fc1", _GATE_UP_SOURCES, Split.GATE_UP, "bias", when=lambda a: a.linear_bias),
    _linear("mlp.linear_fc2", ("mlp.down_proj",), Split.COLUMNS),
    _linear("mlp.linear_fc2", ("mlp.down_proj",), Split.WHOLE, "bias", when=lambda a: a.linear_bias),
)


def experts_mlp(block: str, gate: str, up: str, down: str) -> tuple[Name, ...]:
    """The router and the experts, stored one tensor an expert under `block`."""
    expert = f"{_HF_LAYER}.{block}.experts.{{expert}}"
    experts = f"{_LAYER}.mlp.experts"
    return (
        Name((f"{_LAYER}.mlp.router.weight",), (f"{_HF_LAYER}.{block}.gate.weight",), Split.WHOLE),
        Name(
            (f"{experts}.local_experts.{{expert}}.linear_fc1.weight", f"{experts}.linear_fc1.weight{{expert}}"),
            (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"),
            Split.GATE_UP,
        ),
        Name(
            (f"{experts}.local_experts.{{expert}}.linear_fc2.weight", f"{experts}.linear_fc2.weight{{expert}}"),
            (f"{expert}.{down}.weight",),
            Split.COLUMNS,
        ),
    )
