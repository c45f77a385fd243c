"""The policy, which is trained, and the reference: their chunks, their optimizer and their weights."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.config.settings import Settings
from megatron_rl.trainer.mcore.model.frozen import copy_weights, freeze
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, unwrap, wrap
from megatron_rl.trainer.mcore.model.replay import replay_routing
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.recipe_parts import STAND_ALONE, Recipe
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.optimizer import (
    UpdateResult,
    apply_update,
    build_optimizer,
    build_scheduler,
    force_param_sync,
)


@dataclasses.dataclass(frozen=True)
class Policy:
    """This rank's part of the policy."""

    chunks: list[PackedGPTModel]
    wrapped: list[DistributedDataParallel]
    optimizer: Any
    scheduler: Any
    weights: ModelWeights

    def update(self, scale: float) -> UpdateResult:
        """Multiply the accumulated gradients by `scale`, step, and clear them."""
        return apply_update(self.optimizer, self.scheduler, self.wrapped, scale)

    def synchronize(self) -> None:
        """Bring parameters that are gathered late up to date, so that they can be read."""
        force_param_sync(self.wrapped)


def build_policy(settings: Settings, session: Session, num_updates: int, recipe: Recipe = STAND_ALONE) -> Policy:
    """Build the policy with the weights of --hf-model and a fresh optimizer."""
    chunks = recipe.build_model(settings)
    weights = ModelWeights(chunks, session)
    assert settings.model.hf_model is not None
    weights.load_hf(settings.model.hf_model)
    if settings.rollout.replay_routing or settings.algorithm.replay_routing:
        replay_routing(chunks)
    wrapped = wrap(chunks, settings.ddp)
    optimizer = build_optimizer(settings, wrapped)
    return Policy(chunks, wrapped, optimizer, build_scheduler(settings, optimizer, num_updates), weights)


class Reference:
    """This rank's part of the reference, without gradients, and the fingerprint of its weights as published."""

    def __init__(
        self, chunks: list[torch.nn.Module], weights: ModelWeights, dtype: str | None, interval: int | None = None
    ):
        """Keep frozen `chunks`, which have their weights. Every `interval` versions they take the policy's."""
        self.chunks = chunks
        self._weights = weights
        self._dtype = dtype or weights.architecture.dtype
        self._interval = interval
        self.start = self.fingerprint = weights.fingerprint(dtype)
        """Fingerprints of the weights at the start, and of the weights now."""
        self.version: int | None = None
        """The version of the policy whose weights it took last; None if it has not moved."""

    @property
    def models(self) -> list[PackedGPTModel]:
        """The chunks without their wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]

    def move_if_due(self, policy: Sequence[torch.nn.Module], version: int, fingerprint: str) -> None:
        """Take the policy's weights if an interval ends. They must be gathered, and have this fingerprint."""
        if self._interval is not None and version > 0 and version % self._interval == 0:
            copy_weights(policy, self.chunks)
            self.version, self.fingerprint = version, fingerprint

    def is_policy(self, policy: ModelWeights, version: int, fingerprint: str) -> bool:
        """Check whether its weights equal, to the last bit, the policy's of this version and fingerprint."""
        if fingerprint != self.fingerprint or version == self.version:
            return fingerprint == self.fingerprint
        # Weights are rounded when published: different ones may have the same published fingerprint.
        exact = policy.dtype
        return exact == self._dtype or policy.fingerprint(exact) == self._weights.fingerprint(exact)

    def resume(self, version: int) -> None:
        """Continue with newly loaded weights, which this version of the policy had."""
        self.version, self.fingerprint = version, self._weights.fingerprint(self._dtype)


def build_reference(settings: Settings, session: Session, folder: Path, recipe: Recipe = STAND_ALONE) -> Reference:
    """Build the reference from a Hugging Face folder's weights, with the policy's architecture."""
    chunks = recipe.build_model(settings)
    weights = ModelWeights(chunks, session)
    weights.load_hf(folder)
    host = session.platform if settings.loop.frozen_offload else None
    return Reference(freeze(chunks, host), weights, settings.publish.dtype, settings.algorithm.ref_interval)
