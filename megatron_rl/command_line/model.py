"""The model's architecture: from Megatron's flags, or from a Hugging Face folder that flags must not contradict."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.command_line.resolve import list_architecture_fields
from megatron_rl.flag import format_value
from megatron_rl.flag_parser import Given
from megatron_rl.shared.weights import families
from megatron_rl.shared.weights.families.layers import LINEAR_KEYS
from megatron_rl.types import Architecture, Experts, LinearAttention, Rope, RopeKind

_VARIANT = "described.attention_variant"
REQUIRED = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "max_position_embeddings": "--max-position-embeddings",
    "vocab_size": "--vocab-size",
}

# Megatron's llama3 scaling has these constants.
_LLAMA3 = Rope(kind=RopeKind.LLAMA3, factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
_YARN = Rope(kind=RopeKind.YARN, original_max_positions=4096)
_OF_YARN = ("original_max_positions", "beta_fast", "beta_slow", "truncate")
# The values of Megatron's configuration, which its scripts write into that of any model.
_LINEAR_DEFAULTS = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128, "window": 4}
# Each kind of scaling has a flag of its own for the factor.
_FACTORS = {"described.rope_scaling_factor": RopeKind.LLAMA3, "described.yarn_factor": RopeKind.YARN}
# Flags of Megatron's recipes about parts that only config.json describes: latents, sinks, GPT-OSS's MLP, and others.
# Each has the value that describes no such part; None if any value describes one.
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


def read_folder(folder: Path, given: Mapping[str, Given]) -> tuple[Architecture, list[str]]:
    """Read the architecture in the folder; return it with a problem for each flag that contradicts it.

    The family is that of --weights-bridge, if it is given.
    """
    guest = given.get("model.weights_bridge")
    architecture = families.read_architecture(folder, None if guest is None else guest.value)
    said = _collect_statements(given)
    for name, kind in _FACTORS.items():
        if name in given and architecture.rope.kind is kind:
            said["rope.factor"] = given[name]
        elif name in given and given[name].value != 1 and "rope.kind" not in said:
            said["rope.kind"] = dataclasses.replace(given[name], value=kind)
    problems = [
        *_check_layer_pattern(given, architecture.num_layers),
        *_check_linear_pattern(given, architecture.num_layers),
        *_check_special_parts(given, architecture, str(folder / "config.json")),
    ]
    variant = given.get(_VARIANT)
    if variant is not None and architecture.linear is None:
        problems.append(f"{variant.source}: the model in {folder} has no linear layers: drop the flag")
    if "described.swiglu" in given and architecture.activation != "silu":
        problems.append(f"--swiglu contradicts the activation of {architecture.family} models, GEGLU: drop the flag")
    return architecture, problems + [
        f"{item.source} contradicts {_name_key(architecture, path)} = {_write_json(_look_up(architecture, path))} in "
        f"{folder / 'config.json'}: drop the flag"
        for path, item in said.items()
        if _look_up(architecture, path) != item.value and not _is_idle(architecture, path)
    ]


def _is_idle(architecture: Architecture, path: str) -> bool:
    """Check whether Megatron does not read the flag of a statement: about experts or linear layers that are not there.

    With multi-latent attention it reads neither the width of a head nor biases. It normalizes the weights of experts
    with sigmoids with and without --moe-router-pre-softmax.
    """
    if path.startswith("linear.") and architecture.linear is None:
        return True
    if path in ("kv_channels", "qkv_bias") and architecture.latents is not None:
        return True
    if architecture.experts is None:
        return path.startswith("experts.") and path != "experts.num_experts"
    return path == "experts.normalize_weights" and architecture.experts.score == "sigmoid"


def read_flags(given: Mapping[str, Given]) -> tuple[Architecture | None, list[str]]:
    """Read the architecture that Megatron's flags describe, with the defaults of Megatron's scripts.

    Return it with its problems; it is None if they make it impossible.
    """
    said = {path: item.value for path, item in _collect_statements(given).items()}
    missing = [flag for field, flag in REQUIRED.items() if field not in said]
    refused = [*_refuse_special_parts(given)]
    if missing:
        return None, [
            *refused,
            f"no model is given: write --hf-model with a Hugging Face folder, or describe one with Megatron's flags, "
            f"of which {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
        ]
    problems = [
        *_check_supported(given),
        *refused,
        *_check_effects(said, given),
        *_check_layer_pattern(given, said["num_layers"]),
        *_check_linear_pattern(given, said["num_layers"]),
    ]
    fields: dict[str, Any] = {path: value for path, value in said.items() if "." not in path}
    heads = fields["num_attention_heads"]
    if "kv_channels" not in fields:
        if fields["hidden_size"] % heads:
            problems.append(
                f"--hidden-size {fields['hidden_size']} must be a multiple of --num-attention-heads {heads}: write "
                "--kv-channels too, the width of a head"
            )
        fields["kv_channels"] = fields["hidden_size"] // heads
    if "described.group_query_attention" not in given:
        fields["num_query_groups"] = heads
    fields.setdefault("num_query_groups", 1)
    # Megatron's own default for gated units: two thirds of four times the width, in whole 64s.
    fields.setdefault("ffn_hidden_size", int(fields["hidden_size"] * 8 / 3 / 64) * 64)
    fields.setdefault("tied_embeddings", True)
    fields.setdefault("norm_epsilon", 1e-5)
    fields.setdefault("linear_bias", True)
    # In Megatron, the bias of every linear layer includes that of attention.
    fields["qkv_bias"] = not fields["linear_bias"] and fields.get("qkv_bias", False)
    fields["rope"] = _describe_rope(said)
    fields["experts"] = _describe_experts(said, fields["ffn_hidden_size"])
    fields["linear"] = _describe_linear(said) if _VARIANT in given else None
    named = (("transformer.bf16", "bfloat16"), ("transformer.fp16", "float16"))
    fields["dtype"] = next((name for target, name in named if target in given), "float32")
    architecture = Architecture(family="", **fields)
    if problems:
        return architecture, problems
    return dataclasses.replace(architecture, family=families.infer_family(architecture)), []


def _collect_statements(given: Mapping[str, Given]) -> dict[str, Given]:
    """Collect what the flags say about the architecture, by the path of its field."""
    said = {
        target.removeprefix("architecture."): item
        for target, item in given.items()
        if target.startswith("architecture.")
    }
    if "experts.num_experts" in said and said["experts.num_experts"].value == 0:
        # In Megatron's flags, 0 means a model without experts.
        said["experts.num_experts"] = dataclasses.replace(said["experts.num_experts"], value=None)
    if "described.moe_layer_freq" in given:
        pattern = given["described.moe_layer_freq"]
        dense = pattern.value.count(0) if isinstance(pattern.value, tuple) else 0
        said["experts.num_dense_layers"] = dataclasses.replace(pattern, value=dense)
    if "described.linear_attention_freq" in given:
        interval = given["described.linear_attention_freq"]
        if isinstance(interval.value, tuple):
            first = interval.value.index(0) if 0 in interval.value else len(interval.value)
            interval = dataclasses.replace(interval, value=first + 1)
        said["linear.full_interval"] = interval
    if "described.position_embedding_type" in given and given["described.position_embedding_type"].value == "yarn":
        said["rope.kind"] = dataclasses.replace(given["described.position_embedding_type"], value=RopeKind.YARN)
    if "rope.kind" in said:
        said["rope.kind"] = dataclasses.replace(said["rope.kind"], value=RopeKind(said["rope.kind"].value))
    if "described.interpolation_factor" in given and given["described.interpolation_factor"].value != 1:
        factor = given["described.interpolation_factor"]
        said["rope.kind"] = dataclasses.replace(factor, value=RopeKind.LINEAR)
        said["rope.factor"] = factor
    for name, kind in _FACTORS.items():
        if name in given and "rope.kind" in said and said["rope.kind"].value == kind:
            said["rope.factor"] = given[name]
    return said


def _check_supported(given: Mapping[str, Given]) -> Iterator[str]:
    """Check the flags that every supported model needs: Megatron's defaults describe a GPT of 2019."""
    for name, flag in (
        ("described.swiglu", "--swiglu"),
        ("described.normalization", "--normalization RMSNorm"),
        ("described.position_embedding_type", "--position-embedding-type rope"),
    ):
        if name not in given:
            yield (
                f"{flag} is missing: without it Megatron builds a model that no supported family has; add the flag, "
                "or write --hf-model in place of the flags that describe the model"
            )


def _check_layer_pattern(given: Mapping[str, Given], num_layers: int) -> Iterator[str]:
    """Check that experts are in all layers after the first ones without."""
    if "described.moe_layer_freq" not in given:
        return
    item = given["described.moe_layer_freq"]
    pattern = item.value if isinstance(item.value, tuple) else (item.value,)
    if isinstance(item.value, tuple) and len(pattern) != num_layers:
        yield f"--moe-layer-freq describes {len(pattern)} layers, and the model has {num_layers}: drop the flag"
    elif set(pattern) - {0, 1} or list(pattern) != sorted(pattern) or not pattern[-1]:
        yield (
            f"{item.source}: in every supported model all layers have experts but the first ones, if any; write a 0 "
            "for each of these and a 1 for each other layer, as [0]*1+[1]*47, or drop the flag"
        )


def _check_linear_pattern(given: Mapping[str, Given], num_layers: int) -> Iterator[str]:
    """Check that linear layers are followed by one of full attention, by as many each time."""
    item = given.get("described.linear_attention_freq")
    if item is None:
        if _VARIANT in given:
            yield f"{given[_VARIANT].source} needs --linear-attention-freq: add it"
        return
    pattern = item.value
    if isinstance(pattern, tuple):
        interval = pattern.index(0) + 1 if 0 in pattern else 0
        is_regular = interval and list(pattern) == [int((one + 1) % interval != 0) for one in range(num_layers)]
    else:
        interval, is_regular = pattern, True
    if not is_regular or not 2 <= interval <= num_layers:
        yield (
            f"{item.source}: in every supported model as many linear layers come before each layer of full attention: "
            f"write their number plus 1, from 2 to the {num_layers} layers"
        )


def _check_effects(said: Mapping[str, Any], given: Mapping[str, Given]) -> Iterator[str]:
    """Yield each flag that describes a part that the model lacks."""
    kind = said.get("rope.kind", RopeKind.DEFAULT)
    yarn = "--position-embedding-type yarn"
    needs = {f"architecture.rope.{field}": (RopeKind.YARN, yarn) for field in _OF_YARN}
    needs["described.yarn_factor"] = (RopeKind.YARN, yarn)
    needs["described.rope_scaling_factor"] = (RopeKind.LLAMA3, "--use-rope-scaling")
    if kind is RopeKind.LLAMA3:
        # It has the longest sequence before its scaling too.
        del needs["architecture.rope.original_max_positions"]
    for name, (needed, flag) in needs.items():
        # A factor of 1 scales nothing.
        if name in given and kind is not needed and not (name == "described.yarn_factor" and given[name].value == 1):
            yield f"{given[name].source} has no effect without {flag}: add it, or drop the flag"
    groups = None if "described.group_query_attention" in given else given.get("architecture.num_query_groups")
    if groups is not None and groups.value != said["num_attention_heads"]:
        yield f"{groups.source} has no effect without --group-query-attention: add it, or drop the flag"
    if _VARIANT not in given:
        for field in dataclasses.fields(LinearAttention):
            item = given.get(f"architecture.linear.{field.name}")
            item = given.get("described.linear_attention_freq") if field.name == "full_interval" else item
            if item is not None and item.value != _LINEAR_DEFAULTS.get(field.name):
                yield f"{item.source} has no effect without --experimental-attention-variant: add it, or drop the flag"
    if not said.get("experts.num_experts"):
        for field in dataclasses.fields(Experts)[1:]:
            item = given.get(f"architecture.experts.{field.name}")
            if item is not None and item.value != field.default:
                source = item.source
                yield f"{source} has no effect without --num-experts: add it, or drop the flag"


def _describe_rope(said: Mapping[str, Any]) -> Rope:
    kind = said.get("rope.kind", RopeKind.DEFAULT)
    start = {RopeKind.LLAMA3: _LLAMA3, RopeKind.YARN: _YARN}.get(kind, Rope(kind=kind))
    fields = {path.removeprefix("rope."): value for path, value in said.items() if path.startswith("rope.")}
    return dataclasses.replace(start, **fields)


def _describe_experts(said: Mapping[str, Any], ffn_hidden_size: int) -> Experts | None:
    if not said.get("experts.num_experts"):
        return None
    fields = {path.removeprefix("experts."): value for path, value in said.items() if path.startswith("experts.")}
    if fields.get("score") == "sigmoid":
        # Megatron normalizes the weights of experts with sigmoids in any case.
        fields.pop("normalize_weights", None)
    return Experts(**{"num_active": 2, "ffn_hidden_size": ffn_hidden_size, **fields})


def _describe_linear(said: Mapping[str, Any]) -> LinearAttention:
    fields = {path.removeprefix("linear."): value for path, value in said.items() if path.startswith("linear.")}
    return LinearAttention(**{**_LINEAR_DEFAULTS, **fields})


def _look_up(architecture: Architecture, path: str) -> object:
    value: Any = architecture
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


_ROPE_KEYS = {
    "base": "rope_theta",
    "kind": "rope_type",
    "original_max_positions": "original_max_position_embeddings",
    "rotary_fraction": "partial_rotary_factor",
}


def _name_key(architecture: Architecture, path: str) -> str:
    """Return the name of an architecture's field in config.json."""
    subject, _, field = path.partition(".")
    if subject == "rope":
        return _ROPE_KEYS.get(field, field)
    if subject == "linear":
        return LINEAR_KEYS[field][0]
    if subject != "experts":
        return families.find_config_key(path)
    keys = families.find_family(architecture.family).experts
    return (keys.find_key(field) if keys else None) or field


def _write_json(value: object) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else format_value(value)


def _check_special_parts(given: Mapping[str, Given], architecture: Architecture, place: str) -> Iterator[str]:
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


def _refuse_special_parts(given: Mapping[str, Given]) -> Iterator[str]:
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
    fields = list_architecture_fields(architecture)
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    expected |= {name: fields[name] for name in names}
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
