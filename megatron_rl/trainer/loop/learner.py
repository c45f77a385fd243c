"""The updates of an iteration: losses over its slots, gradients, optimizer steps."""

import dataclasses
import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megatron_rl.algorithm.advantages import GroupAdvantages, compute_deviation
from megatron_rl.algorithm.objective import Objective, Statistics, combine_statistics, copy_to_host
from megatron_rl.errors import ExitCode, MegatronRLError
from megatron_rl.observe.timeline import Timeline
from megatron_rl.trainer.data.slots import IterationSlots
from megatron_rl.trainer.loop.measures import Learned, Measures, UpdateOutcome, measure_batches
from megatron_rl.trainer.loop.mismatch import MismatchBeyond, ReplicaMismatch, combine_parts
from megatron_rl.trainer.mcore.model.replay import take_counts
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.auxiliary import take_losses
from megatron_rl.trainer.mcore.step.forward_step import (
    PolicyStep,
    Unreplayed,
    is_reporter,
    loss_scale,
    measure_unreplayed,
    run_schedule,
)
from megatron_rl.trainer.mcore.step.policy import Policy, Trainable
from megatron_rl.trainer.mcore.step.roles import Roles

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.step.trace import StepTrace


class TrainingFailed(MegatronRLError):
    """Raised in place of an update that must not be made."""

    exit_code = ExitCode.RUN


class Learner:
    """Turns the slots of an iteration into updates of the policy."""

    def __init__(
        self,
        policy: Policy,
        roles: Roles,
        objective: Objective,
        session: Session,
        timeline: Timeline | None = None,
        trace: "StepTrace | None" = None,
        num_kept: int = 0,
        critic: Trainable | None = None,
    ):
        """`trace` records when each pass runs. The log-probs of the first `num_kept` slots are kept."""
        self._policy = policy
        self._roles = roles
        self._objective = objective
        self._session = session
        self._timeline = timeline or Timeline()
        self._trace = trace
        self._num_kept = num_kept
        self._critic = critic
        self._kept: dict[int, torch.Tensor] = {}
        self._unreplayed: Unreplayed | None = None
        self._is_divided = GroupAdvantages(objective.config).is_divided

    def learn(self, slots: IterationSlots, equal: Collection[str] = (), mismatch_bound: float | None = None) -> Learned:
        """Make the updates, each over its own slots; raise before one whose mismatch is beyond the bound.

        `equal` names the roles whose weights are the policy's at the start.
        """
        self._kept = {}
        statistics: list[Statistics] = []
        parts: list[ReplicaMismatch] = []
        updates = []
        for update in range(slots.division.plan.num_updates):
            of_update = self.forward_backward(slots, update, equal)
            with self._timeline.part("agree"):
                found = self._session.gather_or_raise_everywhere(partial(_check, of_update, self._unreplayed))
            of_replicas = [part for part in found if part is not None]
            mismatch = combine_parts(of_replicas, mismatch_bound)
            if not mismatch.is_accepted:
                raise MismatchBeyond(slots.identity.version, mismatch)
            parts += of_replicas
            with self._timeline.part("optimizer"):
                updates.append(self._step(slots, update, of_update))
            statistics += of_update
        with self._timeline.part("report"):
            chunks = self._policy.chunks
            measures = Measures(sums=take_losses(chunks[0].architecture.num_expert_layers) | take_counts(chunks))
            log_probs: dict[int, np.ndarray] = {}
            if is_reporter():
                log_probs = {slot: kept_N.float().cpu().numpy() for slot, kept_N in self._kept.items()}
                measures.merge(measure_batches(slots.list_facts()))
                sums, maxima = combine_statistics(statistics)
                measures.merge(Measures(sums=sums, largest=maxima))
            return Learned(updates, measures, combine_parts(parts, mismatch_bound), slots.list_facts(), log_probs)

    def forward_backward(self, slots: IterationSlots, update: int, equal: Collection[str] = ()) -> list[Statistics]:
        """Add the gradient of the update's losses, summed over all replicas, to every `main_grad`."""
        micro_batches = slots.select_update(update)
        micro_batches.wait_for_first()
        with self._timeline.part("schedule"):
            policy, scale = self._policy.wrapped, loss_scale(len(micro_batches))
            # First: a pass between a backward pass and the step would have the next pass use old parameters.
            self._unreplayed = None if update else measure_unreplayed(policy, slots, self._roles.temperature)
            assignment = self._roles.assign(micro_batches, update, equal)
            step = PolicyStep(
                policy, assignment, self._objective, self._roles.temperature, scale, self._trace, self._num_kept
            )
            reports = run_schedule(step, policy, micro_batches)
            self._kept |= step.kept
            if update == 0 and slots.division.plan.num_updates > 1:
                self._roles.keep_old(slots, equal)
            return copy_to_host([report["statistics"] for report in reports])

    def _step(self, slots: IterationSlots, update: int, of_update: list[Statistics]) -> UpdateOutcome:
        shares = [
            self._objective.share(one.num_targets, one.num_responses) for one in slots.select_update(update).facts
        ]
        denominator = sum_over_replicas(self._session, sum(shares))
        if not denominator:
            raise MegatronRLError(_describe_unscored(slots, update))
        of_critic = None
        if self._critic is not None:
            of_critic = make_update(self._critic, denominator, lambda: self._timeline.span("update"))
            if slots.identity.version < self._objective.config.critic_warmup_iters:
                self._policy.forget_gradients()
                return UpdateOutcome(0.0, 0.0, was_taken=True, denominator=denominator, critic=of_critic)
        if self._is_divided:
            # The deviation of the update's advantages, over all replicas.
            of_replica = combine_statistics(of_update)[0] if is_reporter() else None
            found = self._session.gather_or_raise_everywhere(lambda: of_replica)
            denominator *= compute_deviation(sums for sums in found if sums is not None)
        outcome = make_update(self._policy, denominator, lambda: self._timeline.span("update"))
        return dataclasses.replace(outcome, critic=of_critic)


def _describe_unscored(slots: IterationSlots, update: int) -> str:
    parts = [part for batch in slots.select_update(update).facts for part in batch.parts]
    failed = (f"{part.row}: {one.failure}" for part in parts for one in part.unscored if one.cause != "dropped")
    return (
        f"no response of update {update} of iteration {slots.identity.version} is left to train on: all failed, or "
        "their groups did; correct the cause and resume. The first reason: "
        f"{next(failed, 'the log of the sidecar has it')}"
    )


def sum_over_replicas(session: Session, share: int) -> float:
    """Sum the replicas' shares of an update's denominator."""
    total = torch.tensor(share, dtype=torch.int64, device=session.device)
    dist.all_reduce(total, group=session.replicas_group)
    return float(total)


def make_update(
    policy: Trainable, denominator: float, updating: Callable[[], AbstractContextManager] = nullcontext
) -> UpdateOutcome:
    """Divide the accumulated gradients by the denominator, and step, within the context `updating`."""
    with updating():
        result = policy.update(1.0 / denominator)
    return UpdateOutcome(result.gradient_norm, result.learning_rate, result.was_taken, denominator, result.num_zeros)


def _check(statistics: list[Statistics], unreplayed: Unreplayed | None = None) -> ReplicaMismatch | None:
    """Return the mismatch of this replica's tokens, on its reporting rank; raise unless every loss is finite."""
    for number, one in enumerate(statistics):
        loss = float(one.sums["loss"])
        if not math.isfinite(loss):
            mismatch = float(one.maxima["mismatch"])
            raise TrainingFailed(
                f"the loss of micro-batch {number} is {loss} (its log-probs differ from the engine's by up to "
                f"{mismatch:g}): nothing was updated; look at --lr, --clip-grad and the precision"
            )
    if not is_reporter():
        return None
    sums, maxima = combine_statistics(statistics)
    num_differing = int(sums["mismatch_differing"])
    return ReplicaMismatch(sums["mismatch"], maxima["mismatch"], int(sums["targets"]), unreplayed, num_differing)
