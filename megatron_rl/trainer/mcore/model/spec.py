"""The modules that a transformer layer is built of: TransformerEngine's if it is installed, else torch's."""

import importlib
from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.trainer.mcore.model.attention import SharedPromptAttention
from megatron_rl.trainer.mcore.model.fusions import find_norm
from megatron_rl.trainer.mcore.model.self_attention import (
    FusedSelfAttention,
    InvariantSelfAttention,
    JoinedNormsSelfAttention,
    TwoRopesSelfAttention,
)
from megatron_rl.types import Architecture

# Attention that most families lack: imported for the models that have it.
_LATENTS = "megatron_rl.trainer.mcore.model.latent_attention"
_LINEAR = "megatron_rl.trainer.mcore.model.gated_delta_net"


class NormalizeAndAdd(torch.nn.Module):
    """A layer's function that adds to the residual, and that first normalizes what it adds, as some families do."""

    def __init__(self, config: TransformerConfig, norm: type):
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return a function of an output with its bias, the residual, and the probability of dropout."""
        add_plainly = get_bias_dropout_add(training, fused)

        def add(
            output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            normed = self.norm(output if bias is None else output + bias)
            return add_plainly((normed, None), residual, prob)

        return add


def block_spec(
    config: TransformerConfig,
    architecture: Architecture,
    vp_stage: int | None,
    attention_backend: str,
    qkv_backend: str,
    linear_attention_backend: str,
) -> TransformerBlockSubmodules:
    """Specify the layers of this pipeline stage and its final norm."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    make_layer = _local_layer if config.transformer_impl == "local" else _engine_layer
    kinds = [(architecture.has_experts(one), architecture.is_linear(one)) for one in range(architecture.num_layers)]
    layers: dict[tuple[bool, bool], ModuleSpec] = {}
    for has_experts, is_linear in sorted(set(kinds)):
        layer, norm = make_layer(config, architecture, config.num_moe_experts if has_experts else None)
        if architecture.has_output_norms:
            output_norm = ModuleSpec(module=NormalizeAndAdd, params={"config": config, "norm": norm})
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = output_norm
        if is_linear:
            _make_linear(layer, norm, architecture, linear_attention_backend)
        else:
            _take_packs(layer, architecture, attention_backend, qkv_backend)
        layers[has_experts, is_linear] = layer
    return TransformerBlockSubmodules(layer_specs=[layers[kinds[number]] for number in numbers], layer_norm=norm)


def _take_packs(layer: ModuleSpec, architecture: Architecture, attention_backend: str, qkv_backend: str) -> None:
    if architecture.latents is not None:
        layer.submodules.self_attention.module = importlib.import_module(_LATENTS).PackedLatentAttention
    elif architecture.local_rope is not None:
        layer.submodules.self_attention.module = TwoRopesSelfAttention
        layer.submodules.self_attention.params["architecture"] = architecture
    elif architecture.norms_join_heads:
        layer.submodules.self_attention.module = JoinedNormsSelfAttention
    elif qkv_backend == "triton":
        layer.submodules.self_attention.module = FusedSelfAttention
    elif qkv_backend == "invariant":
        layer.submodules.self_attention.module = InvariantSelfAttention
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=SharedPromptAttention, params={"architecture": architecture, "backend": attention_backend}
    )


def _make_linear(layer: ModuleSpec, norm: type, architecture: Architecture, backend: str) -> None:
    """Put a linear layer in the place of self-attention, with a norm of its own before it."""
    layer.submodules.self_attention = ModuleSpec(
        module=importlib.import_module(_LINEAR).GatedDeltaNet, params={"architecture": architecture, "backend": backend}
    )
    layer.submodules.input_layernorm = norm
    # The local spec would name this norm in checkpoints after a layer that is not there.
    layer.submodules.sharded_state_dict_keys_map.pop("input_layernorm.", None)


def _local_layer(
    config: TransformerConfig, architecture: Architecture, num_experts: int | None
) -> tuple[ModuleSpec, type]:
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=architecture.qk_layernorm and not architecture.norms_join_heads,
        multi_latent_attention=architecture.latents is not None,
        normalization=config.normalization,
    )
    if num_experts:
        # Checkpoints keep the name of the norm before experts. The local spec would name it after a dense layer's fc1.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    norm = find_norm(config)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    if architecture.latents is not None:
        attention.q_layernorm = attention.kv_layernorm = norm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    return layer, norm


def _engine_layer(
    config: TransformerConfig, architecture: Architecture, num_experts: int | None
) -> tuple[ModuleSpec, type]:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=architecture.qk_layernorm and not architecture.norms_join_heads,
        multi_latent_attention=architecture.latents is not None,
        use_te_activation_func=config.use_te_activation_func,
    )
    if architecture.latents is not None:
        # As in the local layer, ranks divide these columns: a whole copy on each would sum its gradients differently.
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = TEColumnParallelLinear
    return layer, TENorm
