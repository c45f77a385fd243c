"""The multi-latent attention of a config.json, read and written."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families.values import read_count
from megatron_rl.types import Latents

_KEYS = {
    "kv_rank": "kv_lora_rank",
    "plain_dim": "qk_nope_head_dim",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_QUERY_RANK = "q_lora_rank"


def read_latents(config: Mapping[str, Any]) -> Latents:
    """Read the widths of a config.json; without q_lora_rank, queries are products of the hidden state."""
    latents = Latents(
        **{field: read_count(config, key) for field, key in _KEYS.items()},
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
    config = {key: getattr(latents, field) for field, key in _KEYS.items()}
    return {**config, _QUERY_RANK: latents.query_rank}
