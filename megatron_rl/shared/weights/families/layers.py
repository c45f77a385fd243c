"""Layers that only some families have, in a config.json, read and written: multi-latent attention, linear layers."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families.values import read_count
from megatron_rl.types import Latents, LinearAttention

_LATENT_KEYS = {
    "kv_rank": "kv_lora_rank",
    "plain_dim": "qk_nope_head_dim",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_QUERY_RANK = "q_lora_rank"


def read_latents(config: Mapping[str, Any]) -> Latents:
    """Read the widths of a config.json; without q_lora_rank, queries are products of the hidden state."""
    latents = Latents(
        **{field: read_count(config, key) for field, key in _LATENT_KEYS.items()},
        query_rank=read_count(config, _QUERY_RANK) if _QUERY_RANK in config else None,
    )
    if latents.rotary_dim % 2:
        raise InputError(f"qk_rope_head_dim = {latents.rotary_dim} in config.json must be even: rope rotates pairs")
    heads, groups = read_count(config, "num_attention_heads"), read_count(config, "num_key_value_heads")
    if heads != groups:
        raise InputError(f"num_key_value_heads = {groups} in config.json must be num_attention_heads = {heads}")
    return latents


def write_latents(latents: Latents) -> dict[str, Any]:
    """Write the keys that `read_latents` reads."""
    config = {key: getattr(latents, field) for field, key in _LATENT_KEYS.items()}
    return {**config, _QUERY_RANK: latents.query_rank}


# The fields of LinearAttention, each with its key and the value of a missing key.
LINEAR_KEYS = {
    "num_key_heads": ("linear_num_key_heads", 16),
    "num_value_heads": ("linear_num_value_heads", 32),
    "key_head_dim": ("linear_key_head_dim", 128),
    "value_head_dim": ("linear_value_head_dim", 128),
    "window": ("linear_conv_kernel_dim", 4),
    "full_interval": ("full_attention_interval", 4),
}
_LINEAR, _FULL = "linear_attention", "full_attention"


def read_linear(config: Mapping[str, Any]) -> LinearAttention:
    """Read the linear layers that a config.json describes; it may list the kind of each layer."""
    fields = {field: read_count({key: default, **config}, key) for field, (key, default) in LINEAR_KEYS.items()}
    types, num_layers = config.get("layer_types"), read_count(config, "num_hidden_layers")
    if types is not None:
        fields["full_interval"] = _find_interval(types, num_layers)
    one = LinearAttention(**fields)
    if one.num_value_heads % one.num_key_heads:
        raise InputError(
            f"linear_num_value_heads = {one.num_value_heads} in config.json must be a multiple of "
            f"linear_num_key_heads = {one.num_key_heads}"
        )
    if not 2 <= one.full_interval <= num_layers:
        raise InputError(
            f"full_attention_interval = {one.full_interval} in config.json must be between 2 and the {num_layers} "
            "layers, so that there are layers of both kinds"
        )
    return one


def write_linear(one: LinearAttention, num_layers: int) -> dict[str, Any]:
    config = {key: getattr(one, field) for field, (key, _) in LINEAR_KEYS.items()}
    return {**config, "layer_types": _list_types(one.full_interval, num_layers)}


def _find_interval(types: Any, num_layers: int) -> int:
    """Return the number of layers from one of full attention to the next, which must be the same everywhere."""
    interval = types.index(_FULL) + 1 if isinstance(types, list) and _FULL in types else 1
    if types != _list_types(interval, num_layers):
        raise InputError(
            f"layer_types in config.json must be one of {_LINEAR!r} and {_FULL!r} for each of the {num_layers} layers, "
            f"with as many of the first before each of the second"
        )
    return interval


def _list_types(interval: int, num_layers: int) -> list[str]:
    return [_LINEAR if (layer + 1) % interval else _FULL for layer in range(num_layers)]
