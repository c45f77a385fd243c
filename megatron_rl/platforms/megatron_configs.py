"""megatron-core's own configurations, imported only when needed: the platform must be installed first."""


def find_megatron_version() -> str:
    import megatron.core

    return str(megatron.core.__version__)


def import_configs(has_latents: bool = False) -> dict[str, type]:
    """Import megatron-core's dataclasses, and return them by the names that the targets of flags use.

    A model with multi-latent attention has another configuration.
    """
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    transformer = MLATransformerConfig if has_latents else TransformerConfig
    return {"transformer": transformer, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}


def find_flash_attention() -> object:
    """Return megatron-core's value for FlashAttention."""
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend.flash
