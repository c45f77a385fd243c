"""megatron-core's configuration of the model, from what the model is, what flags say and what the platform can do."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.types import Architecture


class HasFusions(Protocol):
    """What is asked of a platform here."""

    @property
    def name(self) -> str: ...

    @property
    def unsupported_fusions(self) -> Mapping[str, bool]: ...


def transformer_config(
    architecture: Architecture, overrides: Mapping[str, Any], platform: HasFusions
) -> TransformerConfig:
    """Fields of the architecture, then overrides, then what the platform cannot do."""
    fields = architecture_fields(architecture) | _dtypes(overrides) | dict(overrides)
    return TransformerConfig(**fields | _limits(platform))


def packed_config(architecture: Architecture, overrides: Mapping[str, Any], platform: HasFusions) -> TransformerConfig:
    """`transformer_config` for the way in which models are run here: packs of any length, weights from elsewhere."""
    fixed: dict[str, Any] = {
        "variable_seq_lengths": True,
        # Megatron wants it for variable lengths, in models without experts too.
        "moe_token_dispatcher_type": "alltoall",
        "perform_initialization": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Megatron divides the loss by its weight to report it, and leaves it out only where there is none.
        "moe_z_loss_coeff": overrides.get("moe_z_loss_coeff") or None,
        # Interleaved stages deadlock or compute nonsense unless they send and receive this way.
        "overlap_p2p_comm": bool(overrides.get("virtual_pipeline_model_parallel_size")),
        "batch_p2p_comm": not overrides.get("virtual_pipeline_model_parallel_size"),
        "deallocate_pipeline_outputs": not overrides.get("virtual_pipeline_model_parallel_size"),
    }
    return transformer_config(architecture, {**overrides, **fixed}, platform)


def architecture_fields(architecture: Architecture) -> dict[str, Any]:
    """What TransformerConfig says about the model itself."""
    window = architecture.sliding_window
    fields: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_query_groups,
        "kv_channels": architecture.kv_channels,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_epsilon,
        "qk_layernorm": architecture.qk_layernorm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": architecture.linear_bias,
        "add_qkv_bias": architecture.qkv_bias or architecture.linear_bias,
        # Megatron counts the tokens to the left of a token, the architecture the token too.
        "window_size": None if window is None else (window - 1, 0),
    }
    experts = architecture.experts
    if experts is not None:
        fields |= {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.num_active,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            # A softmax over the chosen experts alone is one over all of them, scaled to sum to one.
            "moe_router_pre_softmax": not experts.normalize_weights,
        }
    return fields


def _dtypes(overrides: Mapping[str, Any]) -> dict[str, torch.dtype]:
    dtype = torch.float32
    if overrides.get("bf16"):
        dtype = torch.bfloat16
    elif overrides.get("fp16"):
        dtype = torch.float16
    return {"params_dtype": dtype, "pipeline_dtype": dtype}


def _limits(platform: HasFusions) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    limits: dict[str, Any] = {field: value for field, value in platform.unsupported_fusions.items() if field in known}
    if platform.name == "cpu":
        # Without TransformerEngine there is no other; grouped GEMM and the fused permutation are its kernels.
        limits |= {
            "transformer_impl": "local",
            "moe_grouped_gemm": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,
        }
    return limits
