"""The properties of a model family: keys of its config.json, supported architectures, names and splits of its tensors.

A family's table of names is a tuple of `Name`s; most families combine the blocks below. `{layer}` and `{expert}` stand
for global numbers, counted from zero.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.types import Architecture, Experts, Rope, RopeKind


class Split(enum.Enum):
    """The layout of the sources in the parameter, and the part of it that a tensor-parallel rank holds."""

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
    """One Megatron parameter and the tensors that it consists of."""

    parameters: tuple[str, ...]
    """The parameter's possible names: Megatron's local layer spec, TransformerEngine's fused one."""
    sources: tuple[str, ...]
    split: Split
    when: Callable[[Architecture], bool] = _always
    exported: bool = True
    """Whether this parameter exports the tensors; False for a copy, since another parameter exports them."""


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
    # With tied embeddings and several pipeline stages, the last stage holds a copy of the first stage's embedding.
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
    """Name the router and the experts, which are stored under `block`; each expert has its own tensors."""
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


# The fields of Architecture, each with its key of config.json, which is the same in every family.
KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "dtype": "dtype",
}


@dataclasses.dataclass(frozen=True)
class ExpertKeys:
    """The keys of config.json that describe a family's experts."""

    num_experts: tuple[str, ...]
    ffn_hidden_size: str
    num_active: str = "num_experts_per_tok"
    normalize_weights: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """One model family; `registry.py` declares and lists them."""

    name: str
    """The model_type of its config.json."""
    hf_class: str
    names: tuple[Name, ...]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Architecture that are the same in every model of the family."""
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Fields of Architecture, each with the boolean keys that set it; the keys of a field must agree."""
    requires: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Keys with their allowed values, the first of which is the default."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of missing keys, if they differ from COMMON_DEFAULTS."""
    experts: ExpertKeys | None = None
    window_key: str | None = None
    """The boolean key that turns the sliding window on; None if the window's size alone does."""
    has_window: bool = False
    default_window: int | None = None
    """Tokens of the window if config.json has no key for it; null in config.json always means no window."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Read the architecture that a config.json of this family describes."""
        window = config.get("sliding_window", self.default_window)
        config = {**COMMON_DEFAULTS, **self.defaults, **{k: v for k, v in config.items() if v is not None}}
        config.setdefault("dtype", config.get("torch_dtype", "float32"))
        self._check_requirements(config)
        heads = _count(config, "num_attention_heads")
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", _count(config, "hidden_size") // heads)
        fields = {field: _field(config, field, key) for field, key in KEYS.items()}
        fields |= self.constants
        fields |= {field: self._switch(config, keys) for field, keys in self.switches.items()}
        window = _count(config, "sliding_window", window) if self._is_windowed(config) and window is not None else None
        _check_layers(config, window)
        return Architecture(
            family=self.name,
            rope=read_rope(config),
            experts=self._read_experts(config),
            sliding_window=window,
            **fields,
        )

    def write(self, architecture: Architecture) -> dict[str, Any]:
        """Write a config.json for an architecture, with which transformers and vLLM can load its weights."""
        reason = self.find_unsupported(architecture)
        if reason:
            raise InputError(f"a {self.name} model cannot have {reason}")
        config: dict[str, Any] = {"architectures": [self.hf_class], "model_type": self.name}
        config |= {key: getattr(architecture, field) for field, key in KEYS.items()}
        config["torch_dtype"] = config.pop("dtype")
        config |= {key: allowed[0] for key, allowed in self.requires.items() if allowed[0] is not None}
        for field, keys in self.switches.items():
            config |= dict.fromkeys(keys, getattr(architecture, field))
        config |= write_rope(architecture.rope)
        if self.experts and architecture.experts:
            config[self.experts.num_experts[0]] = architecture.experts.num_experts
            config[self.experts.ffn_hidden_size] = architecture.experts.ffn_hidden_size
            config[self.experts.num_active] = architecture.experts.num_active
            if self.experts.normalize_weights:
                config[self.experts.normalize_weights] = architecture.experts.normalize_weights
        if self.has_window:
            config["sliding_window"] = architecture.sliding_window
        if self.window_key:
            config[self.window_key] = architecture.sliding_window is not None
        return config

    def find_unsupported(self, architecture: Architecture) -> str | None:
        """Return a feature of this architecture that the family cannot express; None if it can express all of them."""
        for field in ("qk_layernorm", "qkv_bias", "linear_bias"):
            value = getattr(architecture, field)
            if field not in self.switches and value != self.constants.get(field, False):
                return f"{field} = {value}"
        if (architecture.experts is None) != (self.experts is None):
            return "experts" if architecture.experts else "no experts"
        is_raw = architecture.experts is not None and not architecture.experts.normalize_weights
        if is_raw and self.experts and not self.experts.normalize_weights:
            return "expert weights that are not normalized"
        if architecture.sliding_window and not self.has_window:
            return f"sliding_window = {architecture.sliding_window}"
        return None

    def _check_requirements(self, config: Mapping[str, Any]) -> None:
        if "quantization_config" in config:
            raise InputError(
                f"config.json has a quantization_config, and quantized checkpoints cannot be trained: "
                f"use one in {', '.join(_DTYPES)}"
            )
        for key, allowed in {**COMMON_REQUIRES, **self.requires}.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                wanted = " or ".join(repr(item) for item in allowed)
                raise InputError(
                    f"{key} = {value!r} in config.json is not supported for {self.name}: it must be {wanted}"
                )

    def _switch(self, config: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
        values = {key: _boolean(config, key) for key in keys}
        if len(set(values.values())) > 1:
            stated = ", ".join(f"{key} = {value}" for key, value in values.items())
            raise InputError(f"{stated} in config.json must be equal: Megatron has all of these biases or none")
        return all(values.values())

    def _read_experts(self, config: Mapping[str, Any]) -> Experts | None:
        if self.experts is None:
            return None
        keys = self.experts
        num_experts = next((config[key] for key in keys.num_experts if key in config), None)
        if num_experts is None:
            raise InputError(f"config.json must have {keys.num_experts[0]}, which the model is built with")
        normalize = _boolean(config, keys.normalize_weights) if keys.normalize_weights else True
        return Experts(
            _count(config, keys.num_experts[0], num_experts),
            _count(config, keys.num_active),
            _count(config, keys.ffn_hidden_size),
            normalize,
        )

    def _is_windowed(self, config: Mapping[str, Any]) -> bool:
        return self.has_window and (self.window_key is None or _boolean(config, self.window_key))


COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


# Keys that change what transformers or vLLM compute, in any family, each with its neutral value.
COMMON_REQUIRES: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "logit_scale": (1,),
    "partial_rotary_factor": (1,),
    "per_layer_config": (None,),
}

_DTYPES = ("float32", "bfloat16", "float16")
_TYPES = {field.name: field.type for field in dataclasses.fields(Architecture)}


def _required(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise InputError(f"config.json must have {key}, which the model is built with")
    return config[key]


def _field(config: Mapping[str, Any], field: str, key: str) -> Any:
    """Return the value of an Architecture field, in the field's type."""
    if field == "dtype":
        if config[key] not in _DTYPES:
            raise InputError(
                f"{key} = {config[key]!r} in config.json is not supported: it must be {' or '.join(map(repr, _DTYPES))}"
            )
        return config[key]
    if _TYPES[field] is bool:
        return _boolean(config, key)
    return _positive(config, key) if _TYPES[field] is float else _count(config, key)


def _count(config: Mapping[str, Any], key: str, value: Any = None) -> int:
    value = _required(config, key) if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{key} = {value!r} in config.json must be a whole number of at least 1")
    return value


def _positive(config: Mapping[str, Any], key: str) -> float:
    value = _required(config, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{key} = {value!r} in config.json must be a finite number above 0")
    return float(value)


def _boolean(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{key} = {value!r} in config.json must be true or false")
    return value


def _check_layers(config: Mapping[str, Any], window: int | None) -> None:
    """Raise unless layer_types gives every layer the same attention: Megatron's layers attend alike here."""
    wanted = "full_attention" if window is None else "sliding_attention"
    types = config.get("layer_types", [])
    if not isinstance(types, list) or any(kind != wanted for kind in types):
        raise InputError(
            f"layer_types in config.json must be {wanted!r} for every layer, to agree with its window of attention: "
            f"layers that differ from each other are not supported"
        )


_ROPE_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
_OTHER_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim")
_ROPE_NEEDS: Mapping[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeKind.YARN: ("factor",),
}


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Read the rope in either form: rope_theta with rope_scaling, or the rope_parameters of transformers 5."""
    parameters = _rope_parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in list(RopeKind):
        supported = ", ".join(RopeKind)
        raise InputError(f"rope type {kind!r} in config.json is not supported: the supported ones are {supported}")
    for key in ("mscale", "mscale_all_dim"):
        if parameters.get(key):
            raise InputError(f"{key} in config.json's rope parameters is not supported: write attention_factor instead")
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise InputError("partial_rotary_factor in config.json's rope parameters is not supported: it must be 1.0")
    base = _positive({"rope_theta": config["rope_theta"], **parameters}, "rope_theta")
    if kind == RopeKind.DEFAULT:
        return Rope(base=base)
    if missing := [key for key in _ROPE_NEEDS[RopeKind(kind)] if key not in parameters]:
        raise InputError(f"config.json's rope parameters must have {missing[0]}, which {kind} needs")
    if kind in (RopeKind.LLAMA3, RopeKind.YARN):
        # transformers prefers the length beside the rope parameters to the length among them.
        beside = config.get("original_max_position_embeddings")
        length = beside or parameters.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        parameters["original_max_position_embeddings"] = _count(config, "original_max_position_embeddings", length)
    fields = {field: _rope_value(parameters, key) for key, field in _ROPE_KEYS.items() if key in parameters}
    return Rope(base=base, kind=RopeKind(kind), **fields)


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary that holds the rope parameters, without those that are null."""
    found = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, parameters in found.items():
        if not isinstance(parameters, dict):
            raise InputError(f"{key} = {parameters!r} in config.json must be a dictionary")
        if unknown := sorted(parameters.keys() - _ROPE_KEYS.keys() - set(_OTHER_ROPE_KEYS)):
            raise InputError(f"{unknown[0]!r} in config.json's {key} is not supported: remove it if it has no effect")
    if len(found) == 2 and found["rope_scaling"] != found["rope_parameters"]:
        raise InputError(
            "rope_scaling and rope_parameters in config.json contradict each other: write all keys into "
            "rope_parameters, rope_theta too, and remove rope_scaling"
        )
    parameters = next(iter(found.values()), {})
    # A truncate that is null is kept, to be refused: transformers reads it as false, not as the default.
    return {key: value for key, value in parameters.items() if value is not None or key == "truncate"}


def _rope_value(parameters: Mapping[str, Any], key: str) -> Any:
    if key == "truncate":
        return _boolean(parameters, key)
    return parameters[key] if key == "original_max_position_embeddings" else _positive(parameters, key)


def write_rope(rope: Rope) -> dict[str, Any]:
    """Write the rope in the older form, which every reader understands."""
    if rope.kind == RopeKind.DEFAULT:
        return {"rope_theta": rope.base}
    used = {
        RopeKind.LINEAR: ("factor",),
        RopeKind.LLAMA3: ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        RopeKind.YARN: (
            "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
        ),
    }[rope.kind]  # fmt: skip
    scaling = {key: getattr(rope, _ROPE_KEYS[key]) for key in used}
    present = {key: value for key, value in scaling.items() if value is not None}
    return {"rope_theta": rope.base, "rope_scaling": {"rope_type": str(rope.kind), **present}}
