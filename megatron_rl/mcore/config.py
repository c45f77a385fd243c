"""megatron-core's configuration of the model, from what the model is, what flags say and what the platform can do.

Imported before megatron, which must come after the platform is installed: flags are read with it.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron_rl.mcore.flags import generated
from megatron_rl.types import Architecture

Reasons = dict[str, tuple[Any, str]]
"""Values of fields, each with why it holds."""

# Modules that megatron-core computes anew through a class that it has only with TransformerEngine.
_ENGINE_MODULES = ("layernorm", "mlp", "moe_act")
# Kernels of TransformerEngine, which only its layers call.
_ENGINE_ONLY = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "use_te_activation_func")


class HasFusions(Protocol):
    """What is asked of a platform here."""

    @property
    def name(self) -> str: ...

    @property
    def unsupported_fusions(self) -> Mapping[str, bool]: ...


def transformer_config(architecture: Architecture, asked: Mapping[str, Any], platform: HasFusions) -> Any:
    """The TransformerConfig of a model that is trained here, of what is asked for beyond the architecture."""
    settled = {field: value for field, (value, _) in settled_fields(asked, platform).items()}
    return generated.configs()["transformer"](**{**architecture_fields(architecture), **asked, **settled})


def settled_fields(asked: Mapping[str, Any], platform: HasFusions) -> Reasons:
    """What holds whatever is asked for: packs have any length, weights are loaded, and kernels are there or not."""
    return _precision(asked) | _packed(asked) | _limits(asked, platform)


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


def _precision(asked: Mapping[str, Any]) -> Reasons:
    dtype, source = torch.float32, "neither --bf16 nor --fp16"
    if asked.get("bf16"):
        dtype, source = torch.bfloat16, "that of --bf16"
    elif asked.get("fp16"):
        dtype, source = torch.float16, "that of --fp16"
    return {"params_dtype": (dtype, source), "pipeline_dtype": (dtype, source)}


def _packed(asked: Mapping[str, Any]) -> Reasons:
    is_interleaved = bool(asked.get("virtual_pipeline_model_parallel_size"))
    # Interleaved stages deadlock or compute nonsense unless they send and receive this way, and up to 0.18 free outputs
    # that they still need.
    interleaving = "as virtual pipeline stages need it" if is_interleaved else "there are no virtual pipeline stages"
    return {
        "variable_seq_lengths": (True, "packed groups differ in length"),
        # Megatron wants it for variable lengths, in models without experts too.
        "moe_token_dispatcher_type": ("alltoall", "packed groups differ in length"),
        "perform_initialization": (False, "weights are loaded"),
        "hidden_dropout": (0.0, "the policy is the one that the engines sample from"),
        "attention_dropout": (0.0, "the policy is the one that the engines sample from"),
        # Megatron divides the loss by its weight to report it, and leaves it out only where there is none.
        "moe_z_loss_coeff": (asked.get("moe_z_loss_coeff") or None, "without a weight there is no such loss"),
        "overlap_p2p_comm": (is_interleaved, interleaving),
        "batch_p2p_comm": (not is_interleaved, interleaving),
        "deallocate_pipeline_outputs": (not is_interleaved, interleaving),
    }


def _limits(asked: Mapping[str, Any], platform: HasFusions) -> Reasons:
    source = f"platform {platform.name}"
    limits: Reasons = {field: (value, source) for field, value in platform.unsupported_fusions.items()}
    if platform.name != "cpu" and has_transformer_engine():
        source = "--transformer-impl local" if asked.get("transformer_impl") == "local" else ""
    elif platform.name != "cpu":
        source = "TransformerEngine is not installed"
    if source:
        limits |= {"transformer_impl": ("local", source)} | dict.fromkeys(_ENGINE_ONLY, (False, source))
        modules = asked.get("recompute_modules")
        if modules is not None:
            limits["recompute_modules"] = ([name for name in modules if name not in _ENGINE_MODULES], source)
    known = {field.name for field in dataclasses.fields(generated.configs()["transformer"])}
    return {field: reason for field, reason in limits.items() if field in known}


def has_transformer_engine() -> bool:
    """Whether TransformerEngine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None
