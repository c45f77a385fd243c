"""Models in the roles of a loss: all in one pass, or each role in separate passes.

This knows the policy, which is trained, and the old policy, which is the policy at an iteration's start. Any other role
is a frozen model with a name (`algorithm.roles`).
"""

import dataclasses
import importlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_rl.algorithm.declaration import CRITIC, HEAD, OLD, OLD_CRITIC, POLICY, find_role
from megatron_rl.config.settings import Settings
from megatron_rl.trainer.data.slots import IterationSlots, UpdateSlots
from megatron_rl.trainer.mcore.model.frozen import copy_weights, freeze
from megatron_rl.trainer.mcore.model.gpt import build_model
from megatron_rl.trainer.mcore.model.lora import Role
from megatron_rl.trainer.mcore.model.replay import RoutingRecord, replay_routing
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.forward_step import Model, RoleAssignment, compute_log_probs
from megatron_rl.trainer.mcore.step.optimizer import force_param_sync
from megatron_rl.trainer.mcore.step.policy import FrozenModel, Policy, Trainable

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.step.trace import StepTrace

CRITIC_MODULE = "megatron_rl.trainer.mcore.step.critic"
"""The module of runs that have a critic."""


class Roles(Protocol):
    """The models whose log-probs a loss is computed from."""

    temperature: float
    """The divisor of logits before log-probs are taken, in every role."""

    @property
    def kept(self) -> Model:
        """The chunks that an iteration's later updates get other weights in."""
        ...

    def assign(self, micro_batches: UpdateSlots, update: int, equal: Collection[str]) -> RoleAssignment:
        """Assign models to roles for an update; `equal` names the roles with the policy's weights at the start."""
        ...

    def keep_old(self, slots: IterationSlots, equal: Collection[str]) -> None:
        """Keep the old policy for later updates, before the first update changes the weights."""
        ...


class TriModel:
    """All roles in one pass of the pipeline, so that a micro-batch is trained as soon as it arrives.

    A role with the weights of another role is not computed. In an iteration's first update, the old policy has the
    policy's weights, and so has each role that is `equal` to it. In later updates one of these is the old policy too.
    """

    def __init__(
        self,
        policy: Model,
        others: Mapping[str, Model],
        old: Model | None,
        temperature: float,
        replays_routing: bool = False,
        keep: Callable[[Model, Model], None] = copy_weights,
        critic: Model | None = None,
        old_critic: Model | None = None,
        has_heads: bool = False,
    ):
        """Have `keep` copy the policy's weights into `old` when needed; an iteration with one update needs no `old`.

        With `replays_routing`, the policy's routers take the experts that the old policy's choose. A `critic` is
        trained too, and an iteration with several updates also needs an `old_critic`. With `has_heads` these
        read the hidden states of the policy and of the model that is the old policy.
        """
        self._policy = policy
        self._replays_routing = replays_routing
        self._others = others
        self._old = old
        self._keep = keep
        self._trained = {} if critic is None else {CRITIC: critic}
        self._has_heads = has_heads
        self._old_critic = old_critic
        self.temperature = temperature

    @property
    def kept(self) -> Model:
        return [*(self._old or ()), *(self._old_critic or ())]

    def assign(self, micro_batches: UpdateSlots, update: int, equal: Collection[str]) -> RoleAssignment:
        others = self._others
        if update == 0:
            results = {name: POLICY if name in equal else name for name in others}
            frozen = {name: model for name, model in others.items() if name not in equal}
            return self._add_critic(RoleAssignment({OLD: POLICY, **results}, frozen), {})
        start = self._find_start(equal)
        results = {name: start if name in equal else name for name in others}
        frozen = {OLD: self._get_old()} if start == OLD else {}
        frozen |= {name: model for name, model in others.items() if results[name] == name}
        old_critic = {} if self._old_critic is None else {OLD_CRITIC: self._old_critic}
        record = RoutingRecord() if self._replays_routing else None
        return self._add_critic(RoleAssignment({OLD: start, **results}, frozen, record=record), old_critic)

    def _add_critic(self, assignment: RoleAssignment, old: Mapping[str, Model]) -> RoleAssignment:
        results = {**assignment.results, **{name: name for name in (*old, *self._trained)}}
        if self._has_heads:
            heads = {assignment.results[OLD]: old} | {POLICY: self._trained}
            return dataclasses.replace(assignment, results=results, heads=heads)
        frozen = {**assignment.frozen, **old}
        return dataclasses.replace(assignment, results=results, frozen=frozen, trained=self._trained)

    def keep_old(self, slots: IterationSlots, equal: Collection[str]) -> None:
        # The pass before has gathered the parameters that are gathered late.
        if self._find_start(equal) == OLD:
            self._keep(self._policy, self._get_old())
        if self._trained:
            assert self._old_critic is not None
            copy_weights(self._trained[CRITIC], self._old_critic)

    def _find_start(self, equal: Collection[str]) -> str:
        """Return a model with the weights of the iteration's start that all groups need; the old policy if none is."""
        return next((name for name in self._others if name in equal and find_role(name) == name), OLD)

    def _get_old(self) -> Model:
        assert self._old is not None, "several updates need room for the old policy"
        return self._old


class SeparateRoles:
    """Each role in passes of its own: the baseline to compare the fused pass with.

    A role with the policy's weights is not computed. The old policy has them in an iteration's first update, and so has
    each role that is `equal` to it. A frozen role's pass takes all of an update's slots, so it waits for all of them.
    """

    def __init__(
        self,
        policy: Model,
        others: Mapping[str, Model],
        temperature: float,
        trace: "StepTrace | None" = None,
        replays_routing: bool = False,
    ):
        self._policy = policy
        self._others = others
        self._trace = trace
        self._replays_routing = replays_routing
        self._old: dict[int, torch.Tensor] = {}
        self._record: RoutingRecord | None = None
        self.temperature = temperature

    @property
    def kept(self) -> Model:
        return []

    def assign(self, micro_batches: UpdateSlots, update: int, equal: Collection[str]) -> RoleAssignment:
        if update == 1:
            # Parameters that are gathered late are gathered once after each backward pass. The old role's pass came
            # between the backward pass and the step. So the first pass after the step would use the old parameters.
            force_param_sync(self._policy)
        known = {} if update == 0 else {OLD: self._old}
        results = {OLD: OLD if known else POLICY}
        for name, model in self._others.items():
            if update == 0 and name in equal:
                results[name] = POLICY
                continue
            known[name], results[name] = self._log_probs(model, micro_batches, name), name
        return RoleAssignment(results, known=known, record=None if update == 0 else self._record)

    def keep_old(self, slots: IterationSlots, equal: Collection[str]) -> None:
        later = slots.select_after(0)
        later.wait_for_first()
        self._record = RoutingRecord() if self._replays_routing else None
        self._old = self._log_probs(self._policy, later, OLD, self._record)

    def _log_probs(
        self, model: Model, micro_batches: UpdateSlots, role: str, record: RoutingRecord | None = None
    ) -> dict[int, torch.Tensor]:
        """Compute log-probs by slot; only the last pipeline stage returns any."""
        results = compute_log_probs(model, micro_batches, self.temperature, self._trace, role, record)
        return dict(zip(micro_batches.indices, results, strict=False))


def build_roles(
    settings: Settings,
    session: Session,
    policy: Policy,
    others: Mapping[str, FrozenModel],
    num_updates: int,
    trace: "StepTrace | None" = None,
    critic: Trainable | None = None,
) -> Roles:
    """Build the roles that --tri-model names. An iteration with one update keeps no old policy."""
    models = {name: other.chunks for name, other in others.items()}
    temperature = settings.sampling.temperature
    replays_old = settings.algorithm.replay_routing
    if settings.loop.tri_model == "separate":
        return SeparateRoles(policy.wrapped, models, temperature, trace, replays_old)
    host = session.platform if settings.loop.frozen_offload else None
    has_heads = settings.algorithm.critic == HEAD
    trained, old_critic = None if critic is None else critic.wrapped, None
    if settings.critic is not None and num_updates > 1:
        # A head is too small to be worth its way to the device.
        chunks = importlib.import_module(CRITIC_MODULE).build_critic_chunks(settings.critic)
        old_critic = freeze(chunks, None if has_heads else host)
    build = partial(TriModel, critic=trained, old_critic=old_critic, has_heads=has_heads)
    if policy.base is not None:
        adapters = policy.base.adapters
        inner = [chunk.module for chunk in policy.wrapped]
        of_adapters = adapters.play(inner, Role.OLD)
        return build(policy.wrapped, models, of_adapters, temperature, keep=lambda *_: adapters.keep())
    old = None
    if num_updates > 1:
        old_chunks = build_model(settings)
        if settings.rollout.replay_routing or replays_old:
            replay_routing(old_chunks)
        old = freeze(old_chunks, host)
        for other in others.values() if replays_old else ():
            # It is the old policy too while it has its weights.
            replay_routing(other.models)
    return build(policy.wrapped, models, old, temperature, replays_old)
