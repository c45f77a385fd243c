"""Flags about parts that only config.json describes: latents, sinks, GPT-OSS's MLP, and others.

Flag blocks of Megatron's recipes have them. They must agree with the folder's model. Without a folder they are refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.command_line.flags import Given
from megatron_rl.flag import format_value
from megatron_rl.types import Architecture, RopeKind

# The value of each flag that describes no such part; None if any value describes one.
_NEUTRAL: Mapping[str, Any] = {
    "rotary_interleaved": None,
    "softmax_type": "vanilla",
    "quick_geglu": None,
    "enable_gpt_oss": None,
    "glu_linear_offset": 0.0,
    "activation_clamp": None,
    "window_attn_skip_freq": None,
    "multi_latent_attention": None,
    "q_lora_rank": None,
    "kv_lora_rank": None,
    "qk_head_dim": None,
    "qk_pos_emb_head_dim": None,
    "v_head_dim": None,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "rope_type": "rope",
}


def check_agreement(given: Mapping[str, Given], architecture: Architecture, place: str) -> Iterator[str]:
    """Yield the flags that contradict the model of a folder; `place` is its config.json."""
    for name, wanted in _list_expected(architecture).items():
        item = given.get(f"described.{name}")
        if item is not None and item.value != wanted:
            what = "has no such part" if wanted is None else f"has {format_value(wanted)}"
            yield f"{item.source} contradicts {place}, whose {architecture.family} model {what}: drop the flag"
    item, kind = given.get("described.rope_type"), architecture.rope.kind
    # Without latents Megatron knows YaRN by another flag, and this one may say "rope" in any case.
    is_read = item is not None and (item.value == "yarn" or architecture.latents is not None)
    if item is not None and is_read and item.value != ("yarn" if kind is RopeKind.YARN else "rope"):
        yield f"{item.source} contradicts {place}, whose rope has the type {kind}: drop the flag"
    item = given.get("described.window_attn_skip_freq")
    # Megatron reads it with a window only.
    if item is not None and architecture.sliding_window is not None:
        windows = [int(architecture.find_window(layer) is not None) for layer in range(architecture.num_layers)]
        if _list_windows(item.value, architecture.num_layers) != windows:
            yield (
                f"{item.source} contradicts {place}, whose layers have a window (1) or none (0) as in "
                f"[{','.join(map(str, windows))}]: drop the flag"
            )


def refuse_without_folder(given: Mapping[str, Given]) -> Iterator[str]:
    """Yield the flags that describe such a part: a model that flags describe cannot have it."""
    for name, neutral in _NEUTRAL.items():
        item = given.get(f"described.{name}")
        if item is not None and item.value != neutral:
            yield (
                f"{item.source}: it is read from the config.json of the families that have it; write --hf-model, or "
                "drop the flag"
            )


def _list_expected(architecture: Architecture) -> dict[str, Any]:
    """Return the values that agree with the model, for flags that Megatron would read; None if no value agrees."""
    is_clamped = architecture.activation == "clamped_swiglu"
    expected: dict[str, Any] = {
        "rotary_interleaved": architecture.rope.interleaved or None,
        "softmax_type": "learnable" if architecture.has_sinks else "vanilla",
        "quick_geglu": is_clamped or None,
        "enable_gpt_oss": is_clamped or None,
        "glu_linear_offset": 1.0 if is_clamped else 0.0,
        "activation_clamp": architecture.activation_clamp,
        "multi_latent_attention": (architecture.latents is not None) or None,
    }
    latents, rope = architecture.latents, architecture.rope
    if latents is None:
        return expected
    expected |= {
        "q_lora_rank": latents.query_rank,
        "kv_lora_rank": latents.kv_rank,
        "qk_head_dim": latents.plain_dim,
        "qk_pos_emb_head_dim": latents.rotary_dim,
        "v_head_dim": latents.value_dim,
    }
    if rope.kind is RopeKind.YARN:
        # A config.json has both scales, or means Megatron's defaults.
        scales = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
        expected |= {name: _NEUTRAL[name] if scale is None else scale for name, scale in scales.items()}
    return expected


def _list_windows(frequency: int | tuple[int, ...], num_layers: int) -> list[int]:
    """Return a 1 for each layer to which Megatron gives a window, and a 0 for each other."""
    if isinstance(frequency, tuple):
        return list(frequency)
    return [int(frequency < 1 or (layer + 1) % frequency != 0) for layer in range(num_layers)]
