"""The model that is trained: its stages, its optimizer, its weights as others see them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.config.settings import Settings
from megatron_rl.mcore.model.frozen import copy_weights, freeze
from megatron_rl.mcore.model.gpt import PackedGPTModel, unwrap, wrap
from megatron_rl.mcore.model.weights import ModelWeights
from megatron_rl.mcore.recipe import STAND_ALONE, Recipe
from megatron_rl.mcore.session import Session
from megatron_rl.mcore.step.optimizer import (
    UpdateResult,
    apply_update,
    build_optimizer,
    build_scheduler,
    force_param_sync,
)


@dataclasses.dataclass(frozen=True)
class Policy:
    """This rank's part of it."""

    chunks: list[PackedGPTModel]
    wrapped: list[DistributedDataParallel]
    optimizer: Any
    scheduler: Any
    weights: ModelWeights

    def update(self, scale: float) -> UpdateResult:
        """Multiply the gradients that were accumulated, step, and clear them."""
        return apply_update(self.optimizer, self.scheduler, self.wrapped, scale)

    def synchronize(self) -> None:
        """Bring parameters that are gathered late up to date, before anybody reads them."""
        force_param_sync(self.wrapped)


def build_policy(settings: Settings, session: Session, num_updates: int, recipe: Recipe = STAND_ALONE) -> Policy:
    """The policy with the weights of --hf-model, its optimizer untouched."""
    chunks = recipe.build_model(settings)
    weights = ModelWeights(chunks, session)
    assert settings.model.hf_model is not None
    weights.load_hf(settings.model.hf_model)
    wrapped = wrap(chunks, settings.ddp)
    optimizer = build_optimizer(settings, wrapped)
    return Policy(chunks, wrapped, optimizer, build_scheduler(settings, optimizer, num_updates), weights)


class Reference:
    """This rank's part of it, without gradients, and the identity of its weights as they would be published."""

    def __init__(
        self, chunks: list[torch.nn.Module], weights: ModelWeights, dtype: str | None, interval: int | None = None
    ):
        """`chunks` are frozen and have their weights; every `interval` versions they are to take the policy's."""
        self.chunks = chunks
        self._weights = weights
        self._dtype = dtype or weights.architecture.dtype
        self._interval = interval
        self.start = self.fingerprint = weights.fingerprint(dtype)
        """Of the weights that it began with, and of those that it has."""
        self.version: int | None = None
        """Of the policy that it last took the weights of."""

    @property
    def models(self) -> list[PackedGPTModel]:
        """The model inside the wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]

    def move_if_due(self, policy: Sequence[torch.nn.Module], version: int, fingerprint: str) -> None:
        """Take the policy's weights, which are gathered and have that fingerprint, if it is time to."""
        if self._interval is not None and version > 0 and version % self._interval == 0:
            copy_weights(policy, self.chunks)
            self.version, self.fingerprint = version, fingerprint

    def is_policy(self, policy: ModelWeights, version: int, fingerprint: str) -> bool:
        """Whether it has the weights of the policy, which is of that version and fingerprint, to the last bit."""
        if fingerprint != self.fingerprint or version == self.version:
            return fingerprint == self.fingerprint
        # Weights that are rounded to be published may differ where what is published does not.
        exact = policy.dtype
        return exact == self._dtype or policy.fingerprint(exact) == self._weights.fingerprint(exact)

    def resume(self, version: int) -> None:
        """Go on from weights that were loaded since, those of a version of the policy."""
        self.version, self.fingerprint = version, self._weights.fingerprint(self._dtype)


def build_reference(settings: Settings, session: Session, folder: Path, recipe: Recipe = STAND_ALONE) -> Reference:
    """The reference with the weights of a Hugging Face folder, of the policy's architecture."""
    chunks = recipe.build_model(settings)
    weights = ModelWeights(chunks, session)
    weights.load_hf(folder)
    host = session.platform if settings.loop.frozen_offload else None
    return Reference(freeze(chunks, host), weights, settings.publish.dtype, settings.algorithm.ref_interval)
