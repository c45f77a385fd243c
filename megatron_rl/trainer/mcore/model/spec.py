"""The modules that a transformer layer is built of: TransformerEngine's if it is installed, else torch's."""

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_rl.trainer.mcore.model.attention import SharedPromptAttention
from megatron_rl.trainer.mcore.model.fusions import RMSNorm
from megatron_rl.trainer.mcore.model.norms import NormalizeAndAdd, ZeroCenteredRMSNorm
from megatron_rl.trainer.mcore.model.self_attention import FusedSelfAttention, TwoRopesSelfAttention
from megatron_rl.types import Architecture


def block_spec(
    config: TransformerConfig,
    architecture: Architecture,
    vp_stage: int | None,
    attention_backend: str,
    qkv_backend: str,
) -> TransformerBlockSubmodules:
    """Specify the layers of this pipeline stage and its final norm."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    make_layer = _local_layer if config.transformer_impl == "local" else _engine_layer
    layers: dict[bool, ModuleSpec] = {}
    for has_experts in sorted({architecture.has_experts(number) for number in range(architecture.num_layers)}):
        layer, norm = make_layer(config, config.num_moe_experts if has_experts else None)
        if architecture.has_output_norms:
            output_norm = ModuleSpec(module=NormalizeAndAdd, params={"config": config, "norm": norm})
            layer.submodules.self_attn_bda = layer.submodules.mlp_bda = output_norm
        if architecture.local_rope is not None:
            layer.submodules.self_attention.module = TwoRopesSelfAttention
            layer.submodules.self_attention.params["architecture"] = architecture
        elif qkv_backend == "triton":
            layer.submodules.self_attention.module = FusedSelfAttention
        layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
            module=SharedPromptAttention, params={"architecture": architecture, "backend": attention_backend}
        )
        layers[has_experts] = layer
    layer_specs = [layers[architecture.has_experts(number)] for number in numbers]
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=norm)


def _local_layer(config: TransformerConfig, num_experts: int | None) -> tuple[ModuleSpec, type]:
    layer = get_gpt_layer_local_spec(
        num_experts=num_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    if num_experts:
        # Checkpoints keep the name of the norm before experts. The local spec would name it after a dense layer's fc1.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    norm = ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
    return layer, norm


def _engine_layer(config: TransformerConfig, num_experts: int | None) -> tuple[ModuleSpec, type]:
    from megatron.core.extensions.transformer_engine import TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        use_te_activation_func=config.use_te_activation_func,
    )
    return layer, TENorm
