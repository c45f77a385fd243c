"""The modules that a transformer layer is built of: TransformerEngine's if it is installed, else torch's."""

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from megatron_rl.trainer.mcore.model.attention import SharedPromptAttention
from megatron_rl.trainer.mcore.model.fusions import RMSNorm
from megatron_rl.trainer.mcore.model.self_attention import FusedSelfAttention
from megatron_rl.types import Architecture


def block_spec(
    config: TransformerConfig,
    architecture: Architecture,
    vp_stage: int | None,
    attention_backend: str,
    qkv_backend: str,
) -> TransformerBlockSubmodules:
    """Specify the layers of this pipeline stage and its final norm."""
    layer, norm = _local_layer(config) if config.transformer_impl == "local" else _engine_layer(config)
    if qkv_backend == "triton":
        layer.submodules.self_attention.module = FusedSelfAttention
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(
        module=SharedPromptAttention, params={"architecture": architecture, "backend": attention_backend}
    )
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)


def _local_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    if config.num_moe_experts:
        # Checkpoints keep the name of the norm before experts. The local spec would name it after a dense layer's fc1.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer, RMSNorm


def _engine_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    from megatron.core.extensions.transformer_engine import TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        use_te_activation_func=config.use_te_activation_func,
    )
    return layer, TENorm
