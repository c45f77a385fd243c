"""What a model family is: how its config.json reads, what it can express, and how its tensors are named."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.types import Architecture, Experts, Rope, RopeKind
from megatron_rl.weights.families.names import Name

# Architecture's field and the key of config.json that holds it, the same in every family.
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
    """One model family, declared in a file of its own and listed in the registry."""

    name: str
    """The model_type of its config.json."""
    hf_class: str
    names: tuple[Name, ...]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Architecture fields that are the same in every model of the family."""
    switches: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Architecture fields that are on when each of these boolean keys is on; all of them, or none."""
    requires: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Keys that must hold one of these values, the first being the default."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What a key means when config.json leaves it out, where that differs from COMMON_DEFAULTS."""
    experts: ExpertKeys | None = None
    window_key: str | None = None
    """The boolean key that switches the sliding window on; None where the window's size alone does."""
    has_window: bool = False
    default_window: int | None = None
    """The window of a config.json that does not mention one; null in it always means none."""

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """The architecture that a config.json of this family describes."""
        window = config.get("sliding_window", self.default_window)
        config = {**COMMON_DEFAULTS, **self.defaults, **{k: v for k, v in config.items() if v is not None}}
        config.setdefault("dtype", config.get("torch_dtype", "float32"))
        self._check_requirements(config)
        heads = _required(config, "num_attention_heads")
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", _required(config, "hidden_size") // heads)
        fields = {field: _required(config, key) for field, key in KEYS.items()}
        fields |= self.constants
        fields |= {field: self._switch(config, keys) for field, keys in self.switches.items()}
        return Architecture(
            family=self.name,
            rope=read_rope(config),
            experts=self._read_experts(config),
            sliding_window=window if self._is_windowed(config) else None,
            **fields,
        )

    def write(self, architecture: Architecture) -> dict[str, Any]:
        """The config.json of an architecture that has none: what transformers and vLLM need to load its weights."""
        reason = self.objection(architecture)
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

    def objection(self, architecture: Architecture) -> str | None:
        """What of this architecture the family cannot express; None when it can express all of it."""
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
        for key, allowed in self.requires.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                wanted = " or ".join(repr(item) for item in allowed)
                raise InputError(
                    f"{key} = {value!r} in config.json is not supported for {self.name}: it must be {wanted}"
                )

    def _switch(self, config: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
        values = {key: bool(config.get(key, False)) for key in keys}
        if len(set(values.values())) > 1:
            stated = ", ".join(f"{key} = {value}" for key, value in values.items())
            raise InputError(f"{stated} in config.json: Megatron can only have all of these biases, or none of them")
        return all(values.values())

    def _read_experts(self, config: Mapping[str, Any]) -> Experts | None:
        if self.experts is None:
            return None
        keys = self.experts
        num_experts = next((config[key] for key in keys.num_experts if key in config), None)
        if num_experts is None:
            raise InputError(f"config.json has no {keys.num_experts[0]}: it is needed to build the model")
        normalize = bool(config.get(keys.normalize_weights, False)) if keys.normalize_weights else True
        return Experts(
            num_experts, _required(config, keys.num_active), _required(config, keys.ffn_hidden_size), normalize
        )

    def _is_windowed(self, config: Mapping[str, Any]) -> bool:
        return self.has_window and (self.window_key is None or bool(config.get(self.window_key, False)))


COMMON_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


def _required(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise InputError(f"config.json has no {key}: it is needed to build the model")
    return config[key]


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


def read_rope(config: Mapping[str, Any]) -> Rope:
    """Both ways of writing it: rope_theta with rope_scaling, and the rope_parameters of transformers 5."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in list(RopeKind):
        supported = ", ".join(RopeKind)
        raise InputError(f"rope type {kind!r} in config.json is not supported: the supported ones are {supported}")
    for key in ("mscale", "mscale_all_dim"):
        if parameters.get(key):
            raise InputError(f"{key} in config.json's rope parameters is not supported: write attention_factor instead")
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise InputError("partial_rotary_factor in config.json is not supported: it must be 1.0")
    base = parameters.get("rope_theta", config["rope_theta"])
    if kind == RopeKind.DEFAULT:
        return Rope(base=float(base))
    fields = {field: parameters[key] for key, field in _ROPE_KEYS.items() if parameters.get(key) is not None}
    if "factor" not in fields:
        raise InputError(f"config.json's rope parameters have no factor, which {kind} needs")
    if kind in (RopeKind.LLAMA3, RopeKind.YARN):
        fields.setdefault("original_max_positions", config.get("max_position_embeddings"))
    return Rope(base=float(base), kind=RopeKind(kind), **fields)


def write_rope(rope: Rope) -> dict[str, Any]:
    """The older way of writing it, which every reader still understands."""
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
