"""The model that is trained: its stages, its optimizer, its weights as others see them."""

import dataclasses
from typing import Any

from megatron.core.distributed import DistributedDataParallel

from megatron_rl.config import Settings
from megatron_rl.mcore.model import PackedGPTModel, model_of, wrap
from megatron_rl.mcore.optimizer import (
    UpdateResult,
    apply_update,
    optimizer_of,
    schedule_of,
    synchronized,
)
from megatron_rl.mcore.session import Session
from megatron_rl.mcore.training_state import TrainState
from megatron_rl.mcore.weights import ModelWeights


@dataclasses.dataclass(frozen=True)
class Policy:
    """This rank's part of it."""

    chunks: list[PackedGPTModel]
    wrapped: list[DistributedDataParallel]
    optimizer: Any
    schedule: Any
    weights: ModelWeights

    @property
    def state(self) -> TrainState:
        """What a checkpoint holds of it."""
        return TrainState(self.wrapped, self.optimizer, self.schedule)

    def update(self, scale: float) -> UpdateResult:
        """Multiply the gradients that were accumulated, step, and clear them."""
        return apply_update(self.optimizer, self.schedule, self.wrapped, scale)

    def synchronize(self) -> None:
        """Bring parameters that are gathered late up to date, before anybody reads them."""
        synchronized(self.wrapped)


def policy_of(settings: Settings, session: Session, num_updates: int) -> Policy:
    """The policy with the weights of --hf-model, its optimizer untouched."""
    chunks = model_of(settings)
    weights = ModelWeights(chunks, session)
    assert settings.model.hf_model is not None
    weights.load_hf(settings.model.hf_model)
    wrapped = wrap(chunks, settings.ddp)
    optimizer = optimizer_of(settings, wrapped)
    return Policy(chunks, wrapped, optimizer, schedule_of(settings, optimizer, num_updates), weights)
