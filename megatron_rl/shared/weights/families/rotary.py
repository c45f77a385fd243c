"""The rotary positions of a config.json, read and written."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families.values import read_boolean, read_count, read_positive
from megatron_rl.types import Rope, RopeKind

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
# What models with multi-latent attention scale yarn by, in transformers and vLLM alike.
_LATENT_ROPE_KEYS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_OTHER_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim")
_ROPE_NEEDS: Mapping[RopeKind, tuple[str, ...]] = {
    RopeKind.DEFAULT: (),
    RopeKind.LINEAR: ("factor",),
    RopeKind.LLAMA3: ("factor", "low_freq_factor", "high_freq_factor"),
    RopeKind.YARN: ("factor",),
}


def read_rope(config: Mapping[str, Any], default_fraction: float | None = None, has_latents: bool = False) -> Rope:
    """Read the rope in either form: rope_theta with rope_scaling, or the rope_parameters of transformers 5.

    `default_fraction` is the part of a head that rotates without a partial_rotary_factor; None if whole heads must
    rotate.
    """
    parameters = _rope_parameters(config)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in list(RopeKind):
        supported = ", ".join(RopeKind)
        raise InputError(f"rope type {kind!r} in config.json is not supported: the supported ones are {supported}")
    if has_latents:
        return _read_rope_of_latents(config, parameters, kind)
    for key in ("mscale", "mscale_all_dim"):
        if parameters.get(key):
            raise InputError(f"{key} in config.json's rope parameters is not supported: write attention_factor instead")
    if default_fraction is None and parameters.get("partial_rotary_factor", 1) != 1:
        raise InputError("partial_rotary_factor in config.json's rope parameters is not supported: it must be 1.0")
    base = read_positive({"rope_theta": config["rope_theta"], **parameters}, "rope_theta")
    rotary_fraction = 1.0 if default_fraction is None else _read_fraction(config, parameters, default_fraction)
    if kind == RopeKind.DEFAULT:
        return Rope(base=base, rotary_fraction=rotary_fraction)
    if missing := [key for key in _ROPE_NEEDS[RopeKind(kind)] if key not in parameters]:
        raise InputError(f"config.json's rope parameters must have {missing[0]}, which {kind} needs")
    if kind in (RopeKind.LLAMA3, RopeKind.YARN):
        # transformers prefers the length beside the rope parameters to the length among them.
        beside = config.get("original_max_position_embeddings")
        length = beside or parameters.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        parameters["original_max_position_embeddings"] = read_count(config, "original_max_position_embeddings", length)
    fields = {field: _rope_value(parameters, key) for key, field in _ROPE_KEYS.items() if key in parameters}
    return Rope(base=base, kind=RopeKind(kind), rotary_fraction=rotary_fraction, **fields)


def read_two_ropes(config: Mapping[str, Any], local_key: str) -> tuple[Rope, Rope]:
    """Read the rope of layers that see all tokens, and that of layers with a window.

    In the older form, `local_key` is the base of the second, whose frequencies are not scaled.
    """
    by_kind = config.get("rope_parameters")
    if not by_kind:
        others = {key: value for key, value in config.items() if key != "rope_scaling"}
        return read_rope(config), read_rope({**others, "rope_theta": config[local_key]})
    kinds = ("full_attention", "sliding_attention")
    is_by_kind = isinstance(by_kind, dict) and set(by_kind) <= set(kinds)
    if config.get("rope_scaling") or not is_by_kind:
        raise InputError(
            f"rope_parameters in config.json must be a dictionary with {' and '.join(kinds)}, without rope_scaling "
            "beside it"
        )
    bases = {"full_attention": config["rope_theta"], "sliding_attention": config[local_key]}
    full, local = (
        read_rope({**config, "rope_theta": base, "rope_parameters": by_kind.get(kind)}) for kind, base in bases.items()
    )
    return full, local


def _read_rope_of_latents(config: Mapping[str, Any], parameters: dict[str, Any], kind: str) -> Rope:
    """Read the rope of the part of a head that rotates."""
    base = read_positive({"rope_theta": config["rope_theta"], **parameters}, "rope_theta")
    if parameters.pop("partial_rotary_factor", 1) != 1:
        raise InputError("partial_rotary_factor in config.json's rope parameters is not supported: it must be 1.0")
    if kind == RopeKind.DEFAULT:
        return Rope(base=base)
    if kind != RopeKind.YARN:
        raise InputError(
            f"rope type {kind!r} in config.json is not supported with multi-latent attention: only yarn is"
        )
    used = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
    if unknown := sorted(used.keys() - set(_LATENT_ROPE_KEYS)):
        raise InputError(
            f"{unknown[0]} in config.json's rope parameters is not supported with multi-latent attention: transformers "
            "and vLLM read it differently"
        )
    if "factor" not in used:
        raise InputError("config.json's rope parameters must have factor, which yarn needs")
    if ("mscale" in used) != ("mscale_all_dim" in used):
        raise InputError("config.json's rope parameters must have both mscale and mscale_all_dim, or none of them")
    length = used.pop("original_max_position_embeddings", config.get("max_position_embeddings"))
    fields: dict[str, Any] = {key: read_positive(used, key) for key in used}
    length = read_count(config, "original_max_position_embeddings", length)
    return Rope(base=base, kind=RopeKind.YARN, original_max_positions=length, **fields)


def _read_fraction(config: Mapping[str, Any], parameters: Mapping[str, Any], default: float) -> float:
    """Return the part of a head that rotates; transformers prefers the key among the rope parameters."""
    key = "partial_rotary_factor"
    rotary_fraction = read_positive({key: default, **{k: v for k, v in config.items() if k == key}, **parameters}, key)
    width = config["head_dim"]
    if rotary_fraction > 1 or int(width * rotary_fraction) % 2 or not int(width * rotary_fraction):
        raise InputError(
            f"{key} = {rotary_fraction:g} in config.json must rotate an even number of the {width} dimensions of a head"
        )
    return rotary_fraction


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
        return read_boolean(parameters, key)
    return parameters[key] if key == "original_max_position_embeddings" else read_positive(parameters, key)


def find_unsupported_rope(rope: Rope, has_latents: bool) -> str | None:
    """Return a feature of a rope that config.json does not express, with multi-latent attention or without."""
    if not has_latents:
        return None if rope.mscale is None else f"rope.mscale = {rope.mscale:g}"
    if rope.kind not in (RopeKind.DEFAULT, RopeKind.YARN):
        return f"rope.kind = {rope.kind}"
    if rope.attention_factor is not None or not rope.truncate:
        return f"rope.attention_factor = {rope.attention_factor}, or rope.truncate = {rope.truncate}"
    return None


def write_rope(rope: Rope, has_latents: bool = False) -> dict[str, Any]:
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
    if has_latents:
        del scaling["truncate"]
        scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    present = {key: value for key, value in scaling.items() if value is not None}
    return {"rope_theta": rope.base, "rope_scaling": {"rope_type": str(rope.kind), **present}}
