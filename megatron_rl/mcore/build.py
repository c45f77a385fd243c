"""From checked settings to the session and the model that they describe."""

import copy
import datetime

from megatron_rl.config import Settings
from megatron_rl.mcore.model import PackedGPTModel, build_chunks
from megatron_rl.mcore.session import Meet, Session
from megatron_rl.platforms import select


def session_of(
    settings: Settings, waiting: datetime.timedelta = datetime.timedelta(), meet: Meet | None = None
) -> Session:
    """The process groups that the settings ask for, started; a rank may wait `waiting` longer for what is outside."""
    timeout = datetime.timedelta(minutes=settings.distributed.distributed_timeout_minutes)
    return Session(
        settings.parallel_sizes, select(settings.platform), settings.training.seed, timeout, waiting, meet=meet
    )


def model_of(settings: Settings) -> list[PackedGPTModel]:
    """This rank's stages of the model, their weights not yet filled."""
    return build_chunks(
        # Megatron keeps what its schedules call in there, which differs from model to model.
        copy.copy(settings.transformer),
        settings.architecture,
        settings.model.make_vocab_size_divisible_by,
        attention_backend=settings.attention.backend,
    )
