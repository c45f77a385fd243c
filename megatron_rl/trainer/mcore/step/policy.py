"""The policy, which is trained, and frozen models in other roles: their chunks, their optimizer and their weights."""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import MegatronModule

from megatron_rl.algorithm.declaration import find_role
from megatron_rl.algorithm.plug_ins import find_roles
from megatron_rl.config.settings import Settings
from megatron_rl.errors import InputError
from megatron_rl.trainer.mcore.model.frozen import copy_weights, freeze
from megatron_rl.trainer.mcore.model.gpt import BuildModel, PackedGPTModel, build_model, unwrap, wrap
from megatron_rl.trainer.mcore.model.lora import Adapters, Role, attach_adapters
from megatron_rl.trainer.mcore.model.replay import replay_routing
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.optimizer import (
    UpdateResult,
    apply_update,
    build_optimizer,
    build_scheduler,
    force_param_sync,
)

_ADAPTER_FILES = "megatron_rl.trainer.mcore.model.adapter_files"
BASE = "megatron_rl_base"
"""The key of the base's fingerprint in a checkpoint of adapters."""


@dataclasses.dataclass(frozen=True)
class Trainable:
    """This rank's part of what is trained: the policy, or a critic."""

    chunks: Sequence[MegatronModule]
    wrapped: list[DistributedDataParallel]
    optimizer: Any
    scheduler: Any
    start: str = dataclasses.field(default="", kw_only=True)
    """The fingerprint of a critic's first weights, or the name of their kind."""

    def update(self, scale: float) -> UpdateResult:
        """Multiply the accumulated gradients by `scale`, step, and clear them."""
        return apply_update(self.optimizer, self.scheduler, self.wrapped, scale)

    def forget_gradients(self) -> None:
        """Clear the accumulated gradients without an update."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        """Bring parameters that are gathered late up to date, so that they can be read."""
        force_param_sync(self.wrapped)


@dataclasses.dataclass(frozen=True)
class Policy(Trainable):
    """This rank's part of a model that is trained."""

    chunks: list[PackedGPTModel]
    weights: ModelWeights
    """The weights as they are exported, with adapters merged into them."""
    base: "Base | None" = None
    """The frozen model that adapters are trained on; None if all weights are trained."""


def build_policy(settings: Settings, session: Session, num_updates: int, build: BuildModel = build_model) -> Policy:
    """Build the policy with the weights of --hf-model and a fresh optimizer."""
    chunks = build(settings)
    weights = ModelWeights(chunks, session)
    assert settings.model.hf_model is not None
    weights.load_hf(settings.model.hf_model)
    base = build_base(settings, session, chunks, weights)
    if base is not None:
        weights = weights.merged_with(base.adapters)
    if settings.rollout.replay_routing or settings.algorithm.replay_routing:
        replay_routing(chunks)
    return Policy(chunks, *prepare_training(settings, chunks, num_updates), weights, base)


def prepare_training(
    settings: Settings, chunks: Sequence[MegatronModule], num_updates: int
) -> tuple[list[DistributedDataParallel], Any, Any]:
    """Return the chunks with gradient buffers, an optimizer for them, and its scheduler."""
    wrapped = wrap(chunks, settings.ddp)
    optimizer = build_optimizer(settings, wrapped)
    return wrapped, optimizer, build_scheduler(settings, optimizer, num_updates)


@dataclasses.dataclass(frozen=True)
class Base:
    """The frozen model that adapters are trained on."""

    adapters: Adapters
    weights: ModelWeights
    folder: Path
    fingerprint: str

    def check(self, common: Mapping[str, Any], source: Path) -> None:
        """Raise unless a checkpoint, of which this is everything but tensors, holds adapters of this base."""
        if (saved := common.get(BASE, "none")) != self.fingerprint:
            raise InputError(
                f"{source} holds adapters of the base {saved[:12]}, and --hf-model is {self.fingerprint[:12]}: write "
                f"the folder that they were trained on"
            )

    def save_adapters(self, session: Session, folder: Path, dtype: str | None) -> None:
        """Write the adapters in PEFT's format; every rank calls it."""
        dtype = dtype or self.weights.dtype
        importlib.import_module(_ADAPTER_FILES).save_adapters(
            self.adapters, session, folder, dtype, self.folder, self.fingerprint
        )


def build_base(
    settings: Settings, session: Session, chunks: list[PackedGPTModel], weights: ModelWeights
) -> Base | None:
    """Freeze chunks that have their weights, and give them the adapters of --lora-rank; None if there are none."""
    lora, folder = settings.lora, settings.model.hf_model
    if not lora.rank:
        return None
    assert folder is not None
    adapters = session.run_or_raise_everywhere(lambda: attach_adapters(settings, chunks, session.coordinates))
    base = Base(adapters, weights, folder, weights.fingerprint())
    adapters.initialize(settings.training.seed)
    if lora.load is not None:
        importlib.import_module(_ADAPTER_FILES).load_adapters(adapters, session, lora.load, base.fingerprint)
    return base


class FrozenModel:
    """This rank's part of a model without gradients, and the fingerprint of its weights as published."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        weights: ModelWeights,
        dtype: str | None,
        interval: int | None = None,
        may_be_policy: bool = True,
    ):
        """Keep frozen `chunks`, which have their weights. Every `interval` versions they take the policy's.

        Unless `may_be_policy`, they are computed even if their weights equal the policy's.
        """
        self.chunks = chunks
        self._weights = weights
        self._dtype = dtype or weights.architecture.dtype
        self._interval = interval
        self._may_be_policy = may_be_policy
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
        if not self._may_be_policy:
            return False
        if fingerprint != self.fingerprint or version == self.version:
            return fingerprint == self.fingerprint
        # Weights are rounded when published: different ones may have the same published fingerprint.
        exact = policy.dtype
        return exact == self._dtype or policy.fingerprint(exact) == self._weights.fingerprint(exact)

    def resume(self, version: int) -> None:
        """Continue with newly loaded weights, which this version of the policy had."""
        self.version, self.fingerprint = version, self._weights.fingerprint(self._dtype)


class BaseAsReference(FrozenModel):
    """The reference of a policy with adapters: the same parameters, with adapters off."""

    def __init__(self, policy: Policy, session: Session, dtype: str | None):
        assert policy.base is not None
        # The chunks of wrappers for gradients are shared too: a pass in another role has none.
        chunks = policy.base.adapters.play([chunk.module for chunk in policy.wrapped], Role.REFERENCE)
        super().__init__(chunks, policy.base.weights, dtype)
        self._adapters = policy.base.adapters
        self._session = session

    def is_policy(self, policy: ModelWeights, version: int, fingerprint: str) -> bool:
        """Check whether no adapter of any rank changes anything. Merged weights may hide a small change."""
        return all(self._session.gather(self._adapters.are_zero()))


def build_reference(settings: Settings, session: Session, folder: Path, build: BuildModel = build_model) -> FrozenModel:
    """Build the reference from a Hugging Face folder's weights, with the policy's architecture."""
    chunks = build(settings)
    weights = ModelWeights(chunks, session)
    weights.load_hf(folder)
    host = session.platform if settings.loop.frozen_offload else None
    return FrozenModel(freeze(chunks, host), weights, settings.publish.dtype, settings.algorithm.ref_interval)


def build_frozen(settings: Settings, session: Session, name: str) -> FrozenModel:
    """Build the model of this name in a frozen role from its Hugging Face folder, with its own architecture."""
    own = settings.frozen[name]
    assert own.model.hf_model is not None
    chunks = build_model(own)
    weights = ModelWeights(chunks, session)
    weights.load_hf(own.model.hf_model)
    host = session.platform if settings.loop.frozen_offload else None
    role = find_roles(settings.algorithm)[find_role(name)]
    may_be_policy = own.architecture == settings.architecture and role.find_divergence(settings.algorithm) is None
    return FrozenModel(freeze(chunks, host), weights, settings.publish.dtype, may_be_policy=may_be_policy)
