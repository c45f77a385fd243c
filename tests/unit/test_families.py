"""The reading of config.json; a key that would silently make another model is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.families import FAMILIES, derive_config, read_architecture
from megatron_rl.types import Architecture, Experts, Latents, LinearAttention, Rope, RopeKind
from tests.launch_scripts import read_models

_BASE: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 131, "max_position_embeddings": 256,
}  # fmt: skip
_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
    "glm4_moe": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2, "head_dim": 16,
    },
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}  # fmt: skip
_FAMILY["qwen3_5_moe_text"] = _FAMILY["qwen3_next"]
_FAMILY["minimax_m2"] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8, "scoring_func": "sigmoid",
    "use_routing_bias": True,
}  # fmt: skip
_FAMILY["glm4_moe_lite"] = _FAMILY["deepseek_v3"]
_FAMILY["kimi_k2"] = _FAMILY["deepseek_v3"]
_FAMILY["deepseek_v2"] = _FAMILY["deepseek_v3"] | {
    "topk_method": "group_limited_greedy", "scoring_func": "softmax", "topk_group": 3,
}  # fmt: skip
LATENTS = Latents(kv_rank=32, plain_dim=16, rotary_dim=8, value_dim=12, query_rank=24)
GATED = Experts(4, 2, 48, False, shared_ffn_hidden_size=80, has_shared_gate=True)
SIGMOID = Experts(
    16, 4, 48, score="sigmoid", has_bias=True, scaling_factor=2.5, num_groups=4, num_active_groups=2,
    num_dense_layers=1, shared_ffn_hidden_size=96,
)  # fmt: skip
GROUPED = Experts(
    16, 4, 48, normalize_weights=False, scaling_factor=16.0, num_groups=4, num_active_groups=3, num_dense_layers=1,
    shared_ffn_hidden_size=96,
)  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_THREE_LINEAR = ["linear_attention"] * 3
_FULL, _LOCAL = "full_attention", "sliding_attention"
_TWO_ROPES = {
    _FULL: {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
    _LOCAL: {"rope_type": "default", "rope_theta": 1e3},
}
_NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": name, **_BASE, **_FAMILY.get(name, {}), **changes}


def wrapped(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a folder, which has the text model's keys in a dictionary if it holds images too."""
    images = FAMILIES[name].images
    return config if images is None else images.wrap(config)


def read(name: str, **changes: Any) -> Architecture:
    return FAMILIES[name].read(wrapped(name, config_of(name, **changes)))


@pytest.mark.parametrize(
    ("name", "changes", "field", "value"),
    [
        ("llama", {}, "kv_channels", 8),
        ("llama", {"head_dim": None}, "kv_channels", 8),
        ("llama", {"head_dim": 32}, "kv_channels", 32),
        ("qwen3", {}, "kv_channels", 128),
        ("qwen3_moe", {"head_dim": None}, "kv_channels", 8),
        ("llama", {"num_key_value_heads": None}, "num_query_groups", 8),
        ("llama", {"rms_norm_eps": 1e-3}, "norm_epsilon", 1e-3),
        ("qwen2", {}, "norm_epsilon", 1e-6),
        ("mixtral", {}, "norm_epsilon", 1e-5),
        ("qwen2", {}, "tied_embeddings", False),
        ("qwen2", {"tie_word_embeddings": True}, "tied_embeddings", True),
        ("qwen2", {}, "qkv_bias", True),
        ("qwen2", {}, "linear_bias", False),
        ("qwen3", {}, "qk_layernorm", True),
        ("llama", {"attention_bias": True, "mlp_bias": True}, "linear_bias", True),
        ("mistral", {}, "sliding_window", 4096),
        ("mistral", {"sliding_window": None}, "sliding_window", None),
        ("mistral", {"sliding_window": 16, "layer_types": ["sliding_attention"] * 4}, "sliding_window", 16),
        ("mixtral", {}, "sliding_window", None),
        ("mixtral", {"sliding_window": 16}, "sliding_window", 16),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, "sliding_window", None),
        ("qwen3", {"layer_types": ["full_attention"] * 4}, "sliding_window", None),
        ("llama", {}, "dtype", "float32"),
        ("llama", {"torch_dtype": "float16"}, "dtype", "float16"),
        ("llama", {"dtype": "bfloat16", "torch_dtype": "float16"}, "dtype", "bfloat16"),
        ("mixtral", {}, "experts", Experts(4, 2, 96, True)),
        ("qwen3_moe", {}, "experts", Experts(4, 2, 48, False)),
        ("qwen3_moe", {"norm_topk_prob": True}, "experts", Experts(4, 2, 48, True)),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": 6}, "experts", Experts(6, 2, 48, False)),
        ("qwen2_moe", {}, "experts", GATED),
        ("qwen2_moe", {"norm_topk_prob": True}, "experts", dataclasses.replace(GATED, normalize_weights=True)),
        ("qwen2_moe", {}, "qkv_bias", True),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias", False),
        ("glm4_moe", {}, "experts", SIGMOID),
        ("glm4_moe", {"n_shared_experts": None}, "experts", dataclasses.replace(SIGMOID, shared_ffn_hidden_size=48)),
        ("glm4_moe", {"n_routed_experts": None, "num_local_experts": 8}, "experts",
         dataclasses.replace(SIGMOID, num_experts=8)),
        ("glm4_moe", {"first_k_dense_replace": 0}, "experts", dataclasses.replace(SIGMOID, num_dense_layers=0)),
        ("glm4_moe", {"n_group": None, "topk_group": None, "routed_scaling_factor": None}, "experts",
         dataclasses.replace(SIGMOID, num_groups=1, num_active_groups=1, scaling_factor=1.0)),
        ("glm4_moe", {}, "qk_layernorm", False),
        ("glm4_moe", {"use_qk_norm": True}, "qk_layernorm", True),
        ("glm4_moe", {}, "qkv_bias", False),
        ("glm4_moe", {"attention_bias": True}, "qkv_bias", True),
        ("glm4_moe", {}, "norm_epsilon", 1e-5),
        ("glm4_moe", {}, "rope", Rope(rotary_fraction=0.5)),
        ("glm4_moe", {"partial_rotary_factor": 0.25}, "rope", Rope(rotary_fraction=0.25)),
        # Among the rope parameters it wins, as in transformers.
        ("glm4_moe", {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 1}}, "rope", Rope()),
        ("qwen3_next", {}, "experts", dataclasses.replace(GATED, normalize_weights=True)),
        ("qwen3_next", {}, "linear", LinearAttention(16, 32, 128, 128, 4, 4)),
        ("qwen3_next", {}, "rope", Rope(rotary_fraction=0.25)),
        ("qwen3_next", {}, "kv_channels", 256),
        ("qwen3_next", {}, "attention_gate", True),
        ("qwen3_5_text", {}, "zero_centered_norms", True),
        ("qwen3_5_text", {"full_attention_interval": 2}, "linear", LinearAttention(16, 32, 128, 128, 4, 2)),
        # Where layers are listed, transformers reads no interval.
        ("qwen3_5_text", {"full_attention_interval": 2, "layer_types": [*_THREE_LINEAR, "full_attention"]}, "linear",
         LinearAttention(16, 32, 128, 128, 4, 4)),
        ("qwen3_5_text", {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
                          "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3},
         "linear", LinearAttention(4, 8, 16, 24, 3, 4)),
        ("qwen3_5_moe_text", {}, "experts", dataclasses.replace(GATED, normalize_weights=True)),
        ("qwen3_5_moe_text", {"intermediate_size": None}, "linear", LinearAttention(16, 32, 128, 128, 4, 4)),
        ("qwen3_5_moe_text", {}, "rope", Rope(rotary_fraction=0.25)),
        ("ernie4_5", {}, "rope", Rope(5e5, interleaved=True)),
        ("ernie4_5", {}, "kv_channels", 128),
        ("ernie4_5", {}, "norm_epsilon", 1e-5),
        ("ernie4_5", {}, "tied_embeddings", True),
        ("ernie4_5", {"num_key_value_heads": None}, "num_query_groups", 2),
        ("minimax_m2", {}, "experts", Experts(4, 2, 96, score="sigmoid", has_bias=True)),
        ("minimax_m2", {}, "norms_join_heads", True),
        ("minimax_m2", {"quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn",
                                                "weight_block_size": [128, 128]}}, "norms_join_heads", True),
        ("minimax_m2", {}, "rope", Rope(5e6, rotary_fraction=0.5)),
        ("minimax_m2", {"rotary_dim": None}, "rope", Rope(5e6)),
        # It wins over the number of dimensions, as in transformers.
        ("minimax_m2", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope", Rope(5e6, rotary_fraction=0.25)),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, "rope", Rope(5e6, rotary_fraction=0.25)),
        ("seed_oss", {}, "qkv_bias", True),
        ("deepseek_v3", {}, "latents", LATENTS),
        ("deepseek_v3", {"q_lora_rank": None}, "latents", dataclasses.replace(LATENTS, query_rank=None)),
        # transformers writes the width of the part that rotates.
        ("deepseek_v3", {"head_dim": 8}, "kv_channels", 24),
        ("deepseek_v3", {}, "experts", SIGMOID),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}, "rope",
         Rope(1e4, RopeKind.YARN, 40.0, 256, mscale=1.0, mscale_all_dim=1.0)),
        ("kimi_k2", {}, "latents", LATENTS),
        ("kimi_k2", {}, "experts", SIGMOID),
        ("deepseek_v2", {}, "latents", LATENTS),
        ("deepseek_v2", {"routed_scaling_factor": 16.0}, "experts", GROUPED),
        # All experts are in one group.
        ("deepseek_v2", {"topk_method": None, "n_group": None, "topk_group": None, "n_shared_experts": None,
                         "first_k_dense_replace": None}, "experts",
         dataclasses.replace(GROUPED, num_groups=1, num_active_groups=1, scaling_factor=1.0, num_dense_layers=0)),
        ("deepseek_v2", {"topk_method": "greedy", "topk_group": 4, "routed_scaling_factor": 16.0}, "experts",
         dataclasses.replace(GROUPED, num_active_groups=4)),
        ("glm4_moe_lite", {}, "latents", LATENTS),
        ("glm4_moe_lite", {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0}}, "rope", Rope(1e6)),
        ("glm4_moe_lite", {"routed_scaling_factor": None, "mlp_layer_types": ["dense"] + 3 * ["sparse"]}, "experts",
         dataclasses.replace(SIGMOID, scaling_factor=1.8)),
        ("seed_oss", {"attention_bias": False}, "qkv_bias", False),
        ("seed_oss", {}, "kv_channels", 128),
        ("gpt_oss", {}, "full_layers", (1, 3)),
        ("gpt_oss", {}, "sliding_window", 128),
        ("gpt_oss", {}, "activation_clamp", 7.0),
        ("gpt_oss", {"swiglu_limit": 3}, "activation_clamp", 3.0),
        ("gpt_oss", {}, "has_sinks", True),
        ("gpt_oss", {}, "linear_bias", True),
        ("gpt_oss", {}, "kv_channels", 64),
        ("gpt_oss", {}, "experts", Experts(4, 2, 96)),
        ("gpt_oss", {}, "rope", Rope(150000.0, RopeKind.YARN, 32.0, 4096, truncate=False)),
        ("gpt_oss", {"rope_parameters": {"rope_theta": 1e4}}, "rope", Rope(1e4)),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "has_sinks", True),
        ("gemma3_text", {}, "full_layers", ()),
        ("gemma3_text", {"sliding_window_pattern": 2}, "full_layers", (1, 3)),
        ("gemma3_text", {"layer_types": [_LOCAL, _FULL, _LOCAL, _LOCAL]}, "full_layers", (1,)),
        ("gemma3_text", {"layer_types": [_FULL] * 4}, "sliding_window", None),
        ("gemma3_text", {"layer_types": [_FULL] * 4}, "local_rope", None),
        ("gemma3_text", {}, "sliding_window", 4096),
        ("gemma3_text", {}, "rope", Rope(1e6)),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope",
         Rope(1e6, RopeKind.LINEAR, 8.0)),
        ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "local_rope", Rope(1e4)),
        ("gemma3_text", {"rope_local_base_freq": 2e4}, "local_rope", Rope(2e4)),
        ("gemma3_text", {"rope_parameters": _TWO_ROPES}, "rope", Rope(1e5, RopeKind.LINEAR, 4.0)),
        ("gemma3_text", {"rope_parameters": _TWO_ROPES}, "local_rope", Rope(1e3)),
        ("gemma3_text", {"rope_parameters": {_LOCAL: None}}, "rope", Rope(1e6)),
        ("gemma3_text", {"rope_parameters": {_LOCAL: None}}, "local_rope", Rope(1e4)),
        ("gemma3_text", {}, "scale_width", 256),
        ("gemma3_text", {"query_pre_attn_scalar": 168}, "scale_width", 168),
        ("gemma3_text", {}, "kv_channels", 256),
        ("gemma3_text", {"num_key_value_heads": None}, "num_query_groups", 4),
        ("gemma3_text", {}, "tied_embeddings", True),
        ("gemma3_text", {}, "activation", "gelu_tanh"),
    ],
)  # fmt: skip
def test_a_key_of_config_json_gives_a_field_of_the_architecture(
    name: str, changes: dict[str, Any], field: str, value: object
) -> None:
    assert getattr(read(name, **changes), field) == value


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, Rope(1e4)),
        ({"rope_theta": 1e6}, Rope(1e6)),
        ({"rope_parameters": {"rope_theta": 1e6}}, Rope(1e6)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 3.0}, Rope(1e6)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(5e5, RopeKind.LINEAR, 2.0)),
        ({"rope_scaling": _LLAMA3, "rope_parameters": _LLAMA3}, Rope(5e5, RopeKind.LLAMA3, 8.0, 256)),
        ({"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 64}}, Rope(5e5, RopeKind.LLAMA3, 8.0, 64)),
        # Beside the rope parameters it wins, as in transformers.
        ({"rope_parameters": _LLAMA3, "original_max_position_embeddings": 32}, Rope(5e5, RopeKind.LLAMA3, 8.0, 32)),
        (
            {
                "rope_parameters": {**_YARN, "original_max_position_embeddings": 64},
                "original_max_position_embeddings": 32,
            },
            Rope(1e4, RopeKind.YARN, 4.0, 32),
        ),
        ({"rope_parameters": _YARN}, Rope(1e4, RopeKind.YARN, 4.0, 256)),
        (
            {"rope_parameters": {**_YARN, "beta_fast": 8, "attention_factor": 1.5, "truncate": False}},
            Rope(1e4, RopeKind.YARN, 4.0, 256, beta_fast=8.0, attention_factor=1.5, truncate=False),
        ),
        ({"rope_parameters": {**_YARN, "beta_fast": None}}, Rope(1e4, RopeKind.YARN, 4.0, 256)),
    ],
)
def test_rotary_positions_are_read_in_both_spellings(changes: dict[str, Any], rope: Rope) -> None:
    assert read("llama", **changes).rope == rope


def test_mixtral_has_a_rotary_base_of_its_own() -> None:
    assert read("mixtral").rope == Rope(1e6)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        # Settings that transformers computes and this package does not.
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' in config.json is not supported for llama"),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2"),
        ("llama", {"attention_bias": True}, "all of these biases or none"),
        ("llama", {"mlp_bias": True}, "all of these biases or none"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, "mlp_only_layers = [1]"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("glm4_moe", {"num_experts_per_tok": 1, "topk_group": 1}, "one expert for each token"),
        ("glm4_moe", {"n_group": 3}, "16 experts cannot be divided into 3 groups"),
        ("glm4_moe", {"topk_group": 5}, "5 active groups of 4"),
        ("glm4_moe", {"topk_group": 1}, "4 experts from 1 groups: engines compare groups by their two largest scores"),
        ("glm4_moe", {"n_group": 16, "topk_group": 2}, "4 experts from 2 groups of 1"),
        ("glm4_moe", {"first_k_dense_replace": 4}, "4 dense layers leave none of the 4 layers"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor = 0"),
        ("glm4_moe", {"partial_rotary_factor": 0.2}, "must rotate an even number of the 16 dimensions"),
        ("glm4_moe", {"partial_rotary_factor": 1.5}, "must rotate an even number of the 16 dimensions"),
        ("qwen3_next", {"layer_types": [*_THREE_LINEAR, "linear_attention"]}, "layer_types in config.json must be one"),
        ("qwen3_next", {"layer_types": ["full_attention", *_THREE_LINEAR]}, "as many of the first before each"),
        ("qwen3_next", {"layer_types": ["full_attention"] * 4}, "full_attention_interval = 1 in config.json"),
        ("qwen3_next", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_5_text", {"full_attention_interval": 5}, "must be between 2 and the 4 layers"),
        ("qwen3_5_text", {"linear_num_key_heads": 5}, "must be a multiple of linear_num_key_heads = 5"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("ernie4_5", {"use_bias": True}, "use_bias = True"),
        ("minimax_m2", {"scoring_func": None}, 'without it: add "scoring_func": "sigmoid"'),
        ("minimax_m2", {"use_routing_bias": None}, 'without it: add "use_routing_bias": true'),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias = False"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm = False"),
        ("minimax_m2", {"shared_intermediate_size": 96}, "shared_intermediate_size = 96"),
        ("minimax_m2", {"rotary_dim": 7}, "must rotate an even number of the 16 dimensions"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias = True"),
        ("deepseek_v3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 4}, "mlp_layer_types"),
        ("deepseek_v3", {"num_key_value_heads": 4}, "num_key_value_heads = 4 in config.json must be num_attention_h"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim = 7 in config.json must be even"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v3", {"topk_method": None}, 'must have topk_method, since engines take another value'),
        ("deepseek_v3", {"scoring_func": None}, 'without it: add "scoring_func": "sigmoid"'),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias = True"),
        ("deepseek_v2", {"topk_method": "greedy"}, "n_group = 4 in config.json is not supported with topk_method"),
        ("deepseek_v2", {"topk_method": None}, "n_group = 4 in config.json is not supported with topk_method"),
        ("deepseek_v3", {"v_head_dim": None}, "v_head_dim"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0}}, "both mscale and mscale_all"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 2.0}}, "attention_factor"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 4}}, "only yarn is"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias = True"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints cannot be trained"),
        ("gemma3_text", {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ("gemma3_text", {"attention_bias": True}, "attention_bias = True"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window in config.json must be a number"),
        ("gemma3_text", {"layer_types": [_FULL] * 3}, "for each of the 4 layers"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 4}, "for each of the 4 layers"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e6}}, "with full_attention and sliding_attention"),
        ("gemma3_text", {"rope_parameters": _TWO_ROPES, "rope_scaling": _YARN}, "without rope_scaling beside it"),
        ("llama", {"is_causal": False}, "is_causal = False"),
        ("mistral", {"logit_scale": 0.5}, "logit_scale = 0.5"),
        ("llama", {"per_layer_config": {"0": {"num_key_value_heads": 2}}}, "per_layer_config"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints cannot be trained"),
        ("llama", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}, "= [64, 128]"),
        ("llama", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}},
         "fmt = 'e5m2'"),
        ("qwen2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2}, "layer_types in config.json"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "must be 'sliding_attention' for every layer"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1]}}, "'short_factor'"),
        ("llama", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}, "mscale"),
        ("llama", {"rope_parameters": {**_YARN, "truncate": None}}, "truncate = None"),
        ("qwen3", {"rope_parameters": _NESTED}, "'full_attention' in config.json's rope_parameters"),
        (
            "qwen3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e6}},
            "contradict each other",
        ),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "must have factor, which linear needs"),
        ("llama", {"rope_parameters": {**_LLAMA3, "low_freq_factor": None}}, "must have low_freq_factor, which llama3"),
        # Values that are not numbers, or that must be a mistake.
        ("llama", {"num_attention_heads": 0}, "num_attention_heads = 0 in config.json must be a whole number"),
        ("llama", {"num_hidden_layers": "4"}, "num_hidden_layers = '4'"),
        ("llama", {"hidden_size": 64.0}, "hidden_size = 64.0"),
        ("llama", {"vocab_size": None}, "config.json must have vocab_size"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' in config.json must be a finite number above 0"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'"),
        ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
        ("mixtral", {"num_experts_per_tok": True}, "num_experts_per_tok = True"),
        ("qwen3_moe", {"num_experts": None}, "config.json must have num_experts"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1"),
        ("llama", {"dtype": "float64"}, "dtype = 'float64' in config.json is not supported"),
        ("llama", {"torch_dtype": "fp8"}, "dtype = 'fp8'"),
        ("llama", {"rope_theta": 0}, "rope_theta = 0"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling = 'yarn' in config.json must be a dictionary"),
        ("llama", {"rope_parameters": {**_YARN, "beta_fast": 0}}, "beta_fast = 0"),
        ("llama", {"rope_parameters": {**_YARN, "factor": "4"}}, "factor = '4'"),
        ("llama", {"rope_parameters": {**_YARN, "original_max_position_embeddings": 1.5}}, "= 1.5"),
    ],
)  # fmt: skip
def test_a_key_that_this_package_does_not_compute_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(name, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_key_that_the_model_needs_is_named_when_it_is_missing(name: str) -> None:
    keys = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"}
    for key in keys - FAMILIES[name].defaults.keys():
        config = config_of(name)
        del config[key]
        with pytest.raises(InputError, match=f"config.json must have {key}"):
            FAMILIES[name].read(wrapped(name, config))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "rope",
    [
        Rope(5e5),
        Rope(5e5, RopeKind.LINEAR, 2.5),
        Rope(5e5, RopeKind.LLAMA3, 8.0, 64, low_freq_factor=2.0),
        Rope(5e5, RopeKind.YARN, 4.0, 64, beta_fast=8.0, attention_factor=1.25, truncate=False),
    ],
    ids=lambda rope: rope.kind,
)
def test_a_derived_config_reads_as_the_architecture_that_it_was_derived_from(name: str, rope: Rope) -> None:
    rope = dataclasses.replace(rope, interleaved=FAMILIES[name].interleaves_rope)
    architecture = dataclasses.replace(read(name), rope=rope, tied_embeddings=True, dtype="bfloat16")
    if architecture.latents is not None and rope.kind is not RopeKind.DEFAULT:
        with pytest.raises(InputError, match=f"a {name} model cannot have rope"):
            derive_config(architecture)
        scaled = Rope(5e5, RopeKind.YARN, 4.0, 64, beta_fast=8.0, mscale=0.9, mscale_all_dim=0.6)
        architecture = dataclasses.replace(architecture, rope=scaled)
    assert FAMILIES[name].read(json.loads(json.dumps(derive_config(architecture)))) == architecture


def test_moonlight_is_read(tmp_path: Path) -> None:
    """Read the keys of Moonlight-16B-A3B, which has no narrow rows for queries."""
    config = read_models()["Moonlight-16B-A3B"] | {
        "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "ep_size": 1, "initializer_range": 0.02, "pretraining_tp": 1,
        "q_lora_rank": None, "rope_scaling": None, "seq_aux": True, "use_cache": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_architecture(tmp_path)
    assert found.latents == Latents(kv_rank=512, plain_dim=128, rotary_dim=64, value_dim=128, query_rank=None)
    assert found.experts == Experts(
        64, 6, 1408, score="sigmoid", has_bias=True, scaling_factor=2.446, num_dense_layers=1,
        shared_ffn_hidden_size=2816,
    )  # fmt: skip
    assert (found.rope, found.kv_channels, found.norm_epsilon) == (Rope(50000.0), 192, 1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "cannot be read as JSON"),
        ("\xff", "cannot be read as JSON"),
        ("[1]", "must have a model_type"),
        ("{}", "must have a model_type"),
        ('{"model_type": "gpt2"}', "model_type 'gpt2' is not supported: it must be one of llama, "),
        ('{"model_type": ["llama"]}', "model_type ['llama'] is not supported"),
    ],
)
def test_a_folder_without_a_usable_config_is_an_error(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        read_architecture(tmp_path)
    assert message in str(caught.value)


def test_a_file_in_place_of_the_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(InputError, match="model/config.json cannot be read"):
        read_architecture(tmp_path / "model")
