"""An architecture and overrides as megatron-core's TransformerConfig."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_rl import platforms
from megatron_rl.command_line import resolve as config
from megatron_rl.command_line.resolve import build_transformer_config
from megatron_rl.trainer.mcore.model.gpt import settle_bucket_size
from megatron_rl.types import Architecture, Experts

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
    made = build_transformer_config(MODEL, {}, EVERYTHING)
    assert (made.num_layers, made.hidden_size, made.ffn_hidden_size) == (4, 64, 128)
    assert (made.num_attention_heads, made.num_query_groups, made.kv_channels) == (8, 4, 16)
    assert (made.normalization, made.layernorm_epsilon, made.qk_layernorm) == ("RMSNorm", 3e-6, True)
    assert (made.gated_linear_unit, made.activation_func) == (True, F.silu)
    assert (made.add_bias_linear, made.add_qkv_bias) == (False, False)
    assert (made.num_moe_experts, made.moe_router_topk, made.moe_ffn_hidden_size) == (8, 3, 32)
    assert made.moe_router_pre_softmax is True
    assert made.window_size == (31, 0)


def test_a_bias_in_every_linear_layer_includes_the_attentions() -> None:
    dense = dataclasses.replace(MODEL, experts=None, linear_bias=True)
    made = build_transformer_config(dense, {}, EVERYTHING)
    assert (made.add_bias_linear, made.add_qkv_bias) == (True, True)
    assert made.num_moe_experts is None


@pytest.mark.parametrize("has_biases", [True, False])
def test_the_residual_is_added_by_a_compiled_function_only_if_a_bias_is_added_too(has_biases, monkeypatch) -> None:
    monkeypatch.setattr(config, "find_engine_refusal", lambda: None)
    dense = dataclasses.replace(MODEL, experts=None, linear_bias=has_biases)
    made = build_transformer_config(dense, {"bias_dropout_fusion": True}, EVERYTHING)
    assert made.bias_dropout_fusion is has_biases


def test_flags_override_the_architecture_and_the_platform_overrides_both(monkeypatch) -> None:
    overrides = {"bf16": True, "layernorm_epsilon": 1e-4, "bias_activation_fusion": True, "moe_grouped_gemm": True}
    monkeypatch.setattr(config, "find_engine_refusal", lambda: None)
    able = build_transformer_config(MODEL, overrides, EVERYTHING)
    assert (able.layernorm_epsilon, able.bias_activation_fusion, able.moe_grouped_gemm) == (1e-4, True, True)
    assert able.params_dtype == able.pipeline_dtype == torch.bfloat16
    on_cpu = build_transformer_config(MODEL, overrides, platforms.select("cpu"))
    assert (on_cpu.bias_activation_fusion, on_cpu.moe_grouped_gemm, on_cpu.transformer_impl) == (False, False, "local")


def test_a_number_of_buckets_becomes_their_size() -> None:
    of_new_cores = SimpleNamespace(num_buckets=3, bucket_size=None)
    settle_bucket_size(of_new_cores, 110)
    assert of_new_cores.bucket_size == 36
    for given in (SimpleNamespace(bucket_size=7), SimpleNamespace(num_buckets=None, bucket_size=7)):
        settle_bucket_size(given, 110)
        assert given.bucket_size == 7
