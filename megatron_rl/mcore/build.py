"""From checked settings to the session and the model that they describe."""

import datetime

from megatron_rl.config import Settings
from megatron_rl.mcore.backend import backend_of
from megatron_rl.mcore.config import packed_config
from megatron_rl.mcore.model import PackedGPTModel, build_chunks
from megatron_rl.mcore.session import Meet, ParallelSizes, Session
from megatron_rl.mcore.spec import has_transformer_engine
from megatron_rl.platforms import Platform, select


def parallel_sizes(settings: Settings) -> ParallelSizes:
    """Over how many ranks the settings divide each dimension."""
    fields = settings.transformer
    return ParallelSizes(
        tensor=fields.get("tensor_model_parallel_size", 1),
        pipeline=fields.get("pipeline_model_parallel_size", 1),
        virtual_pipeline=fields.get("virtual_pipeline_model_parallel_size"),
        context=fields.get("context_parallel_size", 1),
        expert=fields.get("expert_model_parallel_size", 1),
        expert_tensor=fields.get("expert_tensor_parallel_size"),
    )


def session_of(
    settings: Settings, waiting: datetime.timedelta = datetime.timedelta(), meet: Meet | None = None
) -> Session:
    """The process groups that the settings ask for, started; a rank may wait `waiting` longer for what is outside."""
    timeout = datetime.timedelta(minutes=settings.distributed.distributed_timeout_minutes)
    return Session(parallel_sizes(settings), select(settings.platform), settings.training.seed, timeout, waiting, meet)


def model_of(settings: Settings, platform: Platform) -> list[PackedGPTModel]:
    """This rank's stages of the model, their weights not yet filled."""
    config = packed_config(settings.architecture, settings.transformer, platform)
    return build_chunks(
        config,
        settings.architecture,
        settings.model.make_vocab_size_divisible_by,
        use_transformer_engine=config.transformer_impl != "local" and has_transformer_engine(),
        attention_backend=backend_of(settings).name,
    )
