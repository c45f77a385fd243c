"""Models in the roles of policy, old policy and reference: all in one pass, or each role in passes of its own."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.trainer.data.slots import IterationSlots, UpdateSlots
from megatron_rl.trainer.mcore.model.frozen import copy_weights, freeze
from megatron_rl.trainer.mcore.model.gpt import build_model
from megatron_rl.trainer.mcore.model.lora import Role
from megatron_rl.trainer.mcore.model.replay import RoutingRecord, replay_routing
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.forward_step import Model, RoleAssignment, compute_log_probs
from megatron_rl.trainer.mcore.step.optimizer import force_param_sync
from megatron_rl.trainer.mcore.step.policy import Policy, Reference

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.step.trace import StepTrace


class Roles(Protocol):
    """The models whose log-probs a loss is computed from."""

    temperature: float
    """The divisor of logits before log-probs are taken, in every role."""

    def assign(self, micro_batches: UpdateSlots, update: int, reference_is_policy: bool) -> RoleAssignment:
        """Assign models to roles for an update; `reference_is_policy` describes the iteration's start."""
        ...

    def keep_old(self, slots: IterationSlots, reference_is_policy: bool) -> None:
        """Keep the old policy for later updates, before the first update changes the weights."""
        ...


class TriModel:
    """All roles in one pass of the pipeline, so that a micro-batch is trained as soon as it arrives.

    A role with the weights of another role is not computed. In an iteration's first update, the old policy has the
    policy's weights. While `reference_is_policy`, the reference has the old policy's.
    """

    def __init__(
        self,
        policy: Model,
        reference: Model | None,
        old: Model | None,
        temperature: float,
        replays_routing: bool = False,
        keep: Callable[[Model, Model], None] = copy_weights,
    ):
        """Have `keep` copy the policy's weights into `old` when needed; an iteration with one update needs no `old`.

        With `replays_routing`, the policy's routers take the experts that the old policy's choose.
        """
        self._policy = policy
        self._replays_routing = replays_routing
        self._reference = reference
        self._old = old
        self._keep = keep
        self.temperature = temperature

    def assign(self, micro_batches: UpdateSlots, update: int, reference_is_policy: bool) -> RoleAssignment:
        reference = self._reference
        if update == 0:
            if reference is None:
                return RoleAssignment()
            if reference_is_policy:
                return RoleAssignment(reference=0)
            return RoleAssignment(reference=1, frozen=[reference])
        record = RoutingRecord() if self._replays_routing else None
        if reference is None:
            return RoleAssignment(old=1, frozen=[self._old_model()], record=record)
        if reference_is_policy:
            return RoleAssignment(old=1, reference=1, frozen=[reference], record=record)
        return RoleAssignment(old=1, reference=2, frozen=[self._old_model(), reference], record=record)

    def keep_old(self, slots: IterationSlots, reference_is_policy: bool) -> None:
        # The pass before has gathered the parameters that are gathered late.
        if self._reference is None or not reference_is_policy:
            self._keep(self._policy, self._old_model())

    def _old_model(self) -> Model:
        assert self._old is not None, "several updates need room for the old policy"
        return self._old


class SeparateRoles:
    """Each role in passes of its own: the baseline to compare the fused pass with.

    A role with the policy's weights is not computed. The old policy has them in an iteration's first update, and the
    reference as long as `reference_is_policy`. A frozen role's pass takes all of an update's slots, so it waits for all
    of them.
    """

    def __init__(
        self,
        policy: Model,
        reference: Model | None,
        temperature: float,
        trace: "StepTrace | None" = None,
        replays_routing: bool = False,
    ):
        self._policy = policy
        self._reference = reference
        self._trace = trace
        self._replays_routing = replays_routing
        self._old: dict[int, torch.Tensor] = {}
        self._record: RoutingRecord | None = None
        self.temperature = temperature

    def assign(self, micro_batches: UpdateSlots, update: int, reference_is_policy: bool) -> RoleAssignment:
        if update == 1:
            # Parameters that are gathered late are gathered once after each backward pass. The old role's pass came
            # between the backward pass and the step. So the first pass after the step would use the old parameters.
            force_param_sync(self._policy)
        known = [] if update == 0 else [self._old]
        old, reference = len(known), None
        if self._reference is not None:
            reference = 0
            if update > 0 or not reference_is_policy:
                known.append(self._log_probs(self._reference, micro_batches, "reference"))
                reference = len(known)
        record = None if update == 0 else self._record
        return RoleAssignment(old=old, reference=reference, known=known, record=record)

    def keep_old(self, slots: IterationSlots, reference_is_policy: bool) -> None:
        later = slots.select_after(0)
        later.wait_for_first()
        self._record = RoutingRecord() if self._replays_routing else None
        self._old = self._log_probs(self._policy, later, "old", self._record)

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
    reference: Reference | None,
    num_updates: int,
    trace: "StepTrace | None" = None,
) -> Roles:
    """Build the roles that --tri-model names. An iteration with one update keeps no old policy."""
    chunks = None if reference is None else reference.chunks
    temperature = settings.sampling.temperature
    replays_old = settings.algorithm.replay_routing
    if settings.loop.tri_model == "separate":
        return SeparateRoles(policy.wrapped, chunks, temperature, trace, replays_old)
    if policy.base is not None:
        adapters = policy.base.adapters
        inner = [chunk.module for chunk in policy.wrapped]
        return TriModel(
            policy.wrapped, chunks, adapters.play(inner, Role.OLD), temperature, keep=lambda *_: adapters.keep()
        )
    host = session.platform if settings.loop.frozen_offload else None
    old = None
    if num_updates > 1:
        old_chunks = build_model(settings)
        if settings.rollout.replay_routing or replays_old:
            replay_routing(old_chunks)
        old = freeze(old_chunks, host)
        if replays_old and reference is not None:
            # It is the old policy too while it has its weights.
            replay_routing(reference.models)
    return TriModel(policy.wrapped, chunks, old, temperature, replays_old)
