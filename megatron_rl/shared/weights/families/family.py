"""The properties of a model family: keys of its config.json, supported architectures, names of its tensors."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families.experts import ExpertKeys
from megatron_rl.shared.weights.families.images import Images
from megatron_rl.shared.weights.families.layers import read_latents, read_linear, write_latents, write_linear
from megatron_rl.shared.weights.families.names import Name
from megatron_rl.shared.weights.families.rotary import find_unsupported_rope, read_rope, read_two_ropes, write_rope
from megatron_rl.shared.weights.families.values import find_other_format, read_boolean, read_count, read_positive
from megatron_rl.types import Architecture, Rope

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
    needs: tuple[str, ...] = ()
    """Keys of `requires` that must be written, since vLLM has another default for them."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of missing keys, if they differ from COMMON_DEFAULTS."""
    experts: ExpertKeys | None = None
    window_key: str | None = None
    """The boolean key that turns the sliding window on; None if the window's size alone does."""
    has_window: bool = False
    default_window: int | None = None
    """Tokens of the window if config.json has no key for it; null in config.json always means no window."""
    has_latents: bool = False
    """True if all its models have multi-latent attention."""
    has_prediction_layers: bool = False
    """True if folders may hold layers for multi-token prediction, after the model's own. They are not trained."""
    has_linear_layers: bool = False
    """True if most layers are linear (`linear.py`)."""
    full_every: int | None = None
    """N, if without layer_types every Nth layer sees all tokens and the others have a window; None if all are alike."""
    local_base_key: str | None = None
    """The key of the rope's base in layers with a window; None if all layers have the same rope."""
    scale_key: str | None = None
    """The key of Architecture's `scale_width`; None if scores are scaled by the width of a head."""
    clamp_key: str | None = None
    """The key of Architecture's `activation_clamp`; None if nothing is clamped."""
    default_rope: Mapping[str, Any] | None = None
    """The rope_scaling of a config.json that describes no rope."""
    stacks_experts: bool = False
    """True if files store the experts of a layer in one tensor, and such folders may have experts in MXFP4."""
    fix_in_engines: Callable[[Architecture], Architecture] | None = None
    """The architecture that vLLM computes for a given one, if it does not read all of config.json."""
    default_rotary_fraction: float | None = None
    """The part of a head that rotates without a partial_rotary_factor in config.json; None if whole heads rotate."""
    rotary_width_key: str | None = None
    """The key of the number of a head's dimensions that rotate; None if only partial_rotary_factor says it."""
    interleaves_rope: bool = False
    """True if neighbors rotate as pairs in all its models. Those of multi-latent attention do in any case."""
    images: Images | None = None
    """The place of the text model in folders that hold a vision model too; None for folders of text models."""

    def with_images(self, name: str, hf_class: str, prefix: str, *tower: str, **changes: Any) -> "Family":
        """Return the family of folders that hold such a text model under `prefix`, and a vision model in `tower`."""
        images = Images(f"{name}_text", prefix, tower)
        names = tuple(
            dataclasses.replace(one, sources=tuple(images.rename(source) for source in one.sources))
            for one in self.names
        )
        return dataclasses.replace(self, name=name, hf_class=hf_class, names=names, images=images, **changes)

    def is_of_tower(self, tensor: str) -> bool:
        """Check whether a tensor belongs to the vision model."""
        return self.images is not None and tensor.startswith(self.images.tower)

    def is_left_out(self, tensor: str, num_layers: int) -> bool:
        """Check whether a tensor is not trained: of the vision model, or of a layer after the model's own."""
        prefix = "model." if self.images is None else self.images.prefix
        layer = re.match(rf"{re.escape(prefix)}layers\.(\d+)\.", tensor)
        is_after = tensor.startswith("mtp.") or (layer is not None and int(layer.group(1)) >= num_layers)
        return self.is_of_tower(tensor) or (is_after and self.has_prediction_layers)

    def find_left_out(self, config: Mapping[str, Any], tensors: Iterable[str]) -> set[str]:
        """Find the tensors of a folder that are not trained; of its config.json, only the number of layers is read."""
        if self.images is None and not self.has_prediction_layers:
            return set()
        num_layers = read_count(self._unwrap(config), "num_hidden_layers")
        return {tensor for tensor in tensors if self.is_left_out(tensor, num_layers)}

    def _unwrap(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return config if self.images is None else self.images.unwrap(config)

    def read(self, config: Mapping[str, Any]) -> Architecture:
        """Read the architecture that a config.json of this family describes."""
        config = self._unwrap(config)
        window = config.get("sliding_window", self.default_window)
        config = {**COMMON_DEFAULTS, **self.defaults, **{k: v for k, v in config.items() if v is not None}}
        config.setdefault("dtype", config.get("torch_dtype", "float32"))
        if self.default_rope and not (config.get("rope_scaling") or config.get("rope_parameters")):
            config["rope_scaling"] = dict(self.default_rope)
        self._check_requirements(config)
        heads = read_count(config, "num_attention_heads")
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", read_count(config, "hidden_size") // heads)
        fields = {field: _field(config, field, key) for field, key in KEYS.items()}
        if self.rotary_width_key in config:
            # transformers prefers the other key.
            width = read_count(config, self.rotary_width_key)
            config.setdefault("partial_rotary_factor", width / fields["kv_channels"])
        fields |= self.constants
        fields |= {field: self._switch(config, keys) for field, keys in self.switches.items()}
        window = (
            read_count(config, "sliding_window", window) if self._is_windowed(config) and window is not None else None
        )
        if self.full_every is None and not self.has_linear_layers:
            _check_layers(config, window)
        elif self.full_every is not None:
            window, fields["full_layers"] = _read_layers(config, window, self.full_every)
        _check_mlps(config)
        _check_groups(config)
        latents = read_latents(config) if self.has_latents else None
        if latents is not None:
            fields["kv_channels"] = latents.plain_dim + latents.rotary_dim
        if self.local_base_key is None:
            rope = read_rope(config, self.default_rotary_fraction, self.has_latents)
        else:
            rope, local_rope = read_two_ropes(config, self.local_base_key)
            fields["local_rope"] = None if window is None else local_rope
        if self.scale_key is not None:
            fields["scale_width"] = read_count(config, self.scale_key)
        if self.clamp_key is not None:
            fields["activation_clamp"] = read_positive(config, self.clamp_key)
        return Architecture(
            family=self.name,
            rope=dataclasses.replace(rope, interleaved=self.interleaves_rope),
            latents=latents,
            experts=None if self.experts is None else self.experts.read(config),
            linear=read_linear(config) if self.has_linear_layers else None,
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
        config |= write_rope(architecture.rope, self.has_latents)
        if self.default_rope:
            config.setdefault("rope_scaling", {"rope_type": "default"})
        if self.default_rotary_fraction is not None:
            config["partial_rotary_factor"] = architecture.rope.rotary_fraction
        if self.rotary_width_key is not None:
            config[self.rotary_width_key] = int(architecture.kv_channels * architecture.rope.rotary_fraction)
        if self.experts and architecture.experts:
            config |= self.experts.write(architecture.experts)
        if architecture.latents is not None:
            # Where there is such a key, it is the width of the part that rotates.
            config |= write_latents(architecture.latents) | {"head_dim": architecture.latents.rotary_dim}
        if architecture.linear:
            config |= write_linear(architecture.linear, architecture.num_layers)
        if self.full_every is not None:
            full = [architecture.find_window(layer) is None for layer in range(architecture.num_layers)]
            config["layer_types"] = ["full_attention" if is_full else "sliding_attention" for is_full in full]
        if self.local_base_key and architecture.local_rope:
            config[self.local_base_key] = architecture.local_rope.base
        if self.scale_key:
            config[self.scale_key] = architecture.scale_width or architecture.kv_channels
        if self.clamp_key:
            config[self.clamp_key] = architecture.activation_clamp
        if self.has_window and (self.full_every is None or architecture.sliding_window is not None):
            config["sliding_window"] = architecture.sliding_window
        if self.window_key:
            config[self.window_key] = architecture.sliding_window is not None
        return config if self.images is None else self.images.wrap(config)

    def find_unsupported(self, architecture: Architecture) -> str | None:
        """Return a feature of this architecture that the family cannot express; None if it can express all of them."""
        for field in _CONSTANT_FIELDS:
            value = getattr(architecture, field)
            if field not in self.switches and value != self.constants.get(field, _DEFAULTS[field]):
                return f"{field} = {value}"
        if (architecture.experts is None) != (self.experts is None):
            return "experts" if architecture.experts else "no experts"
        if (architecture.linear is not None) is not self.has_linear_layers:
            return "linear layers" if architecture.linear else "no linear layers"
        if (architecture.latents is not None) != self.has_latents:
            return "multi-latent attention" if architecture.latents else "no multi-latent attention"
        if (reason := find_unsupported_rope(architecture.rope, self.has_latents)) is not None:
            return reason
        if architecture.rope.rotary_fraction != 1 and self.default_rotary_fraction is None:
            return f"rope.rotary_fraction = {architecture.rope.rotary_fraction}"
        if architecture.rope.interleaved is not self.interleaves_rope:
            return f"rope.interleaved = {architecture.rope.interleaved}"
        if architecture.experts and self.experts:
            reason = self.experts.find_unsupported(architecture)
            if reason is not None:
                return reason
        if architecture.sliding_window and not self.has_window:
            return f"sliding_window = {architecture.sliding_window}"
        if architecture.full_layers and self.full_every is None:
            return "layers with a window beside layers without"
        local = architecture.local_rope
        if local is not None and (self.local_base_key is None or local != Rope(base=local.base)):
            return f"local_rope = {local}"
        if architecture.scale_width is not None and self.scale_key is None:
            return f"scale_width = {architecture.scale_width}"
        if (architecture.activation_clamp is None) != (self.clamp_key is None):
            return f"activation_clamp = {architecture.activation_clamp}"
        return None

    def _check_requirements(self, config: Mapping[str, Any]) -> None:
        quantization = config.get("quantization_config", {})
        is_dict = isinstance(quantization, dict)
        is_mxfp4 = self.stacks_experts and is_dict and quantization.get("quant_method") == "mxfp4"
        if quantization and not is_mxfp4 and (mistake := find_other_format(quantization)):
            raise InputError(
                f"config.json has a quantization_config with {mistake}, and such quantized checkpoints cannot be "
                f"trained: use one in {', '.join(_DTYPES)}, or in e4m3 with factors for blocks of 128 x 128"
            )
        if missing := [key for key in self.needs if key not in config]:
            raise InputError(
                f"config.json must have {missing[0]}, since engines take another value without it: add "
                f'"{missing[0]}": {json.dumps(self.requires[missing[0]][0])}'
            )
        for key, allowed in {**COMMON_REQUIRES, **self.requires}.items():
            if key == "partial_rotary_factor" and self.default_rotary_fraction is not None:
                continue
            value = config.get(key, allowed[0])
            if value not in allowed:
                wanted = " or ".join(repr(item) for item in allowed)
                raise InputError(
                    f"{key} = {value!r} in config.json is not supported for {self.name}: it must be {wanted}"
                )

    def _switch(self, config: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
        values = {key: read_boolean(config, key) for key in keys}
        if len(set(values.values())) > 1:
            stated = ", ".join(f"{key} = {value}" for key, value in values.items())
            raise InputError(f"{stated} in config.json must be equal: Megatron has all of these biases or none")
        return all(values.values())

    def _is_windowed(self, config: Mapping[str, Any]) -> bool:
        return self.has_window and (self.window_key is None or read_boolean(config, self.window_key))


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
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Architecture)}
# Fields that are the same in every model of a family, unless a key of config.json switches them.
_CONSTANT_FIELDS = (
    "qk_layernorm", "qkv_bias", "linear_bias", "activation", "has_output_norms", "zero_centered_norms",
    "scales_embedding", "has_sinks", "norms_join_heads",
)  # fmt: skip


def _field(config: Mapping[str, Any], field: str, key: str) -> Any:
    """Return the value of an Architecture field, in the field's type."""
    if field == "dtype":
        if config[key] not in _DTYPES:
            raise InputError(
                f"{key} = {config[key]!r} in config.json is not supported: it must be {' or '.join(map(repr, _DTYPES))}"
            )
        return config[key]
    if _TYPES[field] is bool:
        return read_boolean(config, key)
    return read_positive(config, key) if _TYPES[field] is float else read_count(config, key)


def _read_layers(config: Mapping[str, Any], window: int | None, every: int) -> tuple[int | None, tuple[int, ...]]:
    """Read the window, and the layers without one; the window is None if no layer has it."""
    full, local = "full_attention", "sliding_attention"
    num_layers = read_count(config, "num_hidden_layers")
    every = read_count({"sliding_window_pattern": every, **config}, "sliding_window_pattern")
    kinds = config.get("layer_types", [local if number % every else full for number in range(1, num_layers + 1)])
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {full, local}:
        wanted = f"{full!r} or {local!r} for each of the {num_layers} layers"
        raise InputError(f"layer_types in config.json must be {wanted}")
    if local not in kinds:
        return None, ()
    if window is None:
        raise InputError(f"sliding_window in config.json must be a number: layer_types has {local!r}")
    return window, tuple(layer for layer, kind in enumerate(kinds) if kind == full)


def _check_mlps(config: Mapping[str, Any]) -> None:
    """Raise unless mlp_layer_types, which some models have, gives only the first layers an MLP in place of experts."""
    types = config.get("mlp_layer_types")
    dense = config.get("first_k_dense_replace")
    if types is None or dense is None:
        return
    wanted = ["dense" if layer < dense else "sparse" for layer in range(read_count(config, "num_hidden_layers"))]
    if types != wanted:
        raise InputError(
            f"mlp_layer_types in config.json must agree with first_k_dense_replace = {dense!r}: 'dense' for as many "
            "first layers, and 'sparse' for the others"
        )


def _check_groups(config: Mapping[str, Any]) -> None:
    """Raise if experts have groups without effect: transformers then ignores them, and vLLM does not."""
    groups = config.get("n_group", 1)
    if config.get("topk_method") == "greedy" and groups not in (1, config.get("topk_group")):
        raise InputError(
            f"n_group = {groups!r} in config.json is not supported with topk_method = 'greedy', since transformers and "
            "vLLM read it differently: remove n_group, or write 'group_limited_greedy'"
        )


def _check_layers(config: Mapping[str, Any], window: int | None) -> None:
    """Raise unless layer_types gives every layer the same attention: Megatron's layers attend alike here."""
    wanted = "full_attention" if window is None else "sliding_attention"
    types = config.get("layer_types", [])
    if not isinstance(types, list) or any(kind != wanted for kind in types):
        raise InputError(
            f"layer_types in config.json must be {wanted!r} for every layer, to agree with its window of attention: "
            f"layers that differ from each other are not supported"
        )
