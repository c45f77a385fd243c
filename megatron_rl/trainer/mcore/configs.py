"""megatron-core's own configurations, imported only when needed: the platform must be installed first."""


def find_megatron_version() -> str:
    """Return the version of the installed megatron-core."""
    import megatron.core

    return str(megatron.core.__version__)


def import_configs() -> dict[str, type]:
    """Import megatron-core's dataclasses, and return them by the names that the targets of flags use."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    return {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
