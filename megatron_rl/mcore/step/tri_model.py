"""Policy, old policy and reference in one run of the schedule: a micro-batch is trained the moment it arrives.

Each stage runs a micro-batch through the frozen models, without gradients, and then through the policy. What the frozen
ones send to the next stage goes in the policy's messages (`piggyback.py`); nothing of theirs comes back.

Letters: N targets.
"""

import dataclasses
from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_rl.algorithm.objective import RoleLogProbs
from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import Batch
from megatron_rl.data.packing import Pack
from megatron_rl.data.slots import IterationSlots
from megatron_rl.mcore.model.frozen import copy_weights, freeze
from megatron_rl.mcore.model.gpt import build_model, unwrap
from megatron_rl.mcore.session import Session
from megatron_rl.mcore.step import schedule
from megatron_rl.mcore.step.piggyback import Piggyback
from megatron_rl.mcore.step.policy import Policy, Reference
from megatron_rl.mcore.step.roles import RoleLoss, SeparateRoles

Chunks = Sequence[torch.nn.Module]


@dataclasses.dataclass(frozen=True)
class Cast:
    """The frozen models of one update, and who plays which role: their number from 1, or 0 for the policy."""

    frozen: list[Chunks]
    old: int
    reference: int | None


class TriModel:
    """All roles in one pass of the pipeline.

    A role that has another's weights is not computed: old at an iteration's first update, when it is the policy; the
    reference while `reference_is_policy`, when it is old.
    """

    def __init__(self, policy: Chunks, reference: Chunks | None, old: Chunks | None, temperature: float):
        """`old` is room for the policy's weights, without which an iteration has one update."""
        self._policy = policy
        self._reference = reference
        self._old = old
        self._temperature = temperature

    def forward_backward(
        self,
        slots: IterationSlots,
        update: int,
        loss: RoleLoss,
        share: schedule.Share[Batch],
        reference_is_policy: bool = False,
    ) -> None:
        """Leave the gradient of the update's sum of losses, over all replicas, in every `main_grad`."""
        micro_batches = slots.of_update(update)
        micro_batches.wait_for_first()
        reference_is_start = self._reference is not None and reference_is_policy
        cast = self._cast(update, reference_is_start)
        exchange = None
        if cast.frozen and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            exchange = Piggyback(get_model_config(self._policy[0]), len(cast.frozen))

        def compute(chunk: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, schedule.LossOfLogProbs]:
            beside = self._run_frozen(chunk, batch.pack, cast, exchange)
            output = chunk(batch.pack, self._temperature)
            if exchange is not None and not unwrap(chunk).post_process:
                exchange.put(output, beside)

            def role_loss(policy_N: torch.Tensor) -> torch.Tensor:
                log_probs = [policy_N.detach(), *beside]
                reference_N = None if cast.reference is None else log_probs[cast.reference]
                return loss(RoleLogProbs(policy_N, log_probs[cast.old], reference_N), batch)

            return output, role_loss

        schedule.train(self._policy, micro_batches, compute, share, exchange)
        if update == 0 and len(slots.after(0)) and not reference_is_start:
            # Before the first step, and after a pass: that has gathered the parameters that are gathered late.
            copy_weights(self._policy, self._room())

    def _cast(self, update: int, reference_is_start: bool) -> Cast:
        reference = self._reference
        if update == 0:
            if reference is None:
                return Cast([], old=0, reference=None)
            return Cast([], old=0, reference=0) if reference_is_start else Cast([reference], old=0, reference=1)
        if reference is None:
            return Cast([self._room()], old=1, reference=None)
        if reference_is_start:
            return Cast([reference], old=1, reference=1)
        return Cast([self._room(), reference], old=1, reference=2)

    def _room(self) -> Chunks:
        assert self._old is not None, "several updates need room for the old policy"
        return self._old

    def _run_frozen(
        self, chunk: torch.nn.Module, pack: Pack, cast: Cast, exchange: Piggyback | None
    ) -> list[torch.Tensor]:
        """What the same stage of each frozen model makes of a micro-batch."""
        stage = list(self._policy).index(chunk)
        hidden = unwrap(chunk).decoder.input_tensor
        inputs: list[torch.Tensor | None] = [None] * len(cast.frozen)
        if exchange is not None and hidden is not None:
            inputs = [*exchange.take(hidden)]
        return [self._forward(chunks[stage], pack, given) for chunks, given in zip(cast.frozen, inputs, strict=True)]

    @torch.no_grad()
    def _forward(self, chunk: torch.nn.Module, pack: Pack, hidden: torch.Tensor | None) -> torch.Tensor:
        unwrap(chunk).set_input_tensor([hidden])
        output = chunk(pack, self._temperature)
        # It would keep what came from the stage before until the next micro-batch.
        unwrap(chunk).set_input_tensor([None])
        return output


def build_roles(
    settings: Settings, session: Session, policy: Policy, reference: Reference | None, num_updates: int
) -> TriModel | SeparateRoles:
    """The roles as --tri-model has them; with one update an iteration there is no room for an old policy."""
    chunks = None if reference is None else reference.chunks
    temperature = settings.sampling.temperature
    if settings.loop.tri_model == "separate":
        return SeparateRoles(policy.wrapped, chunks, temperature)
    host = session.platform if settings.loop.frozen_offload else None
    old = freeze(build_model(settings), host) if num_updates > 1 else None
    return TriModel(policy.wrapped, chunks, old, temperature)
