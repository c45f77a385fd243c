"""Policy, old policy and reference over the slots of an update, behind one interface.

Letters: N targets.
"""

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state

from megatron_rl.algorithm.objective import RoleLogProbs
from megatron_rl.data.batch import Batch
from megatron_rl.data.slots import IterationSlots
from megatron_rl.mcore.step import schedule
from megatron_rl.mcore.step.optimizer import force_param_sync

RoleLoss = Callable[[RoleLogProbs, Batch], torch.Tensor]
"""The sum of a micro-batch's losses, of its log-probs under each role."""


class SeparateRoles:
    """Each role in passes of its own: what a fused pass is compared with.

    A role that has the policy's weights is not computed: old at an iteration's first update, the reference as long as
    `reference_is_policy`. The frozen roles' passes take the whole of an update's slots, so they wait for all of them.
    """

    def __init__(
        self,
        policy: Sequence[torch.nn.Module],
        reference: Sequence[torch.nn.Module] | None,
        temperature: float,
    ):
        self._policy = policy
        self._reference = reference
        self._temperature = temperature
        self._old: dict[int, torch.Tensor] = {}

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
        if update == 1:
            # Megatron gathers parameters that are gathered late once after each backward pass. The old role's pass
            # came between it and the step, so the first pass after the step would run on what was gathered before.
            force_param_sync(self._policy)
        reference: dict[int, torch.Tensor] = {}
        is_computed = self._reference is not None and not (reference_is_policy and update == 0)
        if is_computed:
            assert self._reference is not None
            results = schedule.forward(self._reference, micro_batches, self._temperature)
            reference = dict(zip(micro_batches.indices, results, strict=False))

        def role_loss(policy_N: torch.Tensor, batch: Batch) -> torch.Tensor:
            own_N = policy_N.detach()
            reference_N = None
            if self._reference is not None:
                reference_N = reference[batch.index] if is_computed else own_N
            return loss(RoleLogProbs(policy_N, self._old.get(batch.index, own_N), reference_N), batch)

        schedule.forward_backward(self._policy, micro_batches, role_loss, self._temperature, share)
        if update == 0:
            self._remember(slots)

    def _remember(self, slots: IterationSlots) -> None:
        """The log-probs that the later updates compare with, before the first one changes the weights."""
        later = slots.after(0)
        self._old = {}
        if len(later):
            later.wait_for_first()
            results = schedule.forward(self._policy, later, self._temperature)
            self._old = dict(zip(later.indices, results, strict=False))


def is_reporter() -> bool:
    """Whether this rank speaks for its replica: the one of its ranks that sees losses, or the first of several."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_and_context_parallel_rank() == 0
