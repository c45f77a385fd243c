"""An architecture and overrides as megatron-core's TransformerConfig."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_rl import platforms
from megatron_rl.errors import UsageError
from megatron_rl.mcore.config import transformer_config
from megatron_rl.types import Architecture, Experts
from tests import hf_models
from tests.distributed.layouts import CASES, build, session_of

MODEL = Architecture(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=16,
    vocab_size=200,
    max_position_embeddings=256,
    norm_epsilon=3e-6,
    qk_layernorm=True,
    experts=Experts(num_experts=8, num_active=3, ffn_hidden_size=32, normalize_weights=False),
    sliding_window=32,
)
EVERYTHING = SimpleNamespace(name="cuda", unsupported_fusions={})


def test_the_configuration_has_every_field_of_the_architecture() -> None:
    config = transformer_config(MODEL, {}, EVERYTHING)
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (4, 64, 128)
    assert (config.num_attention_heads, config.num_query_groups, config.kv_channels) == (8, 4, 16)
    assert (config.normalization, config.layernorm_epsilon, config.qk_layernorm) == ("RMSNorm", 3e-6, True)
    assert (config.gated_linear_unit, config.activation_func) == (True, F.silu)
    assert (config.add_bias_linear, config.add_qkv_bias) == (False, False)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (8, 3, 32)
    assert config.moe_router_pre_softmax is True
    assert config.window_size == (31, 0)


def test_a_bias_of_every_linear_layer_is_one_of_the_attention_too() -> None:
    dense = dataclasses.replace(MODEL, experts=None, linear_bias=True)
    config = transformer_config(dense, {}, EVERYTHING)
    assert (config.add_bias_linear, config.add_qkv_bias) == (True, True)
    assert config.num_moe_experts is None


def test_overrides_go_before_the_architecture_and_the_platform_before_both() -> None:
    overrides = {"bf16": True, "layernorm_epsilon": 1e-4, "masked_softmax_fusion": True, "moe_grouped_gemm": True}
    able = transformer_config(MODEL, overrides, EVERYTHING)
    assert (able.layernorm_epsilon, able.masked_softmax_fusion, able.moe_grouped_gemm) == (1e-4, True, True)
    assert able.params_dtype == able.pipeline_dtype == torch.bfloat16
    on_cpu = transformer_config(MODEL, overrides, platforms.select("cpu"))
    assert (on_cpu.masked_softmax_fusion, on_cpu.moe_grouped_gemm, on_cpu.transformer_impl) == (False, False, "local")


def test_recomputing_what_only_transformer_engine_can_is_an_error_where_the_local_layers_are_built(tmp_path) -> None:
    folder = hf_models.draw("qwen3", tmp_path / "qwen3")
    changes = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
    with session_of(CASES["TP1"]) as session, pytest.raises(UsageError, match="--recompute-modules mlp needs"):
        build(session, CASES["TP1"], folder, **changes)
