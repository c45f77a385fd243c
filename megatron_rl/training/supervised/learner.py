"""An update over demonstrations: the mean of minus the log-probs of the responses' tokens, over all replicas."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_rl.mcore.session import Session
from megatron_rl.mcore.step.auxiliary import take_losses
from megatron_rl.mcore.step.forward_step import is_reporter, loss_scale, run_schedule
from megatron_rl.mcore.step.policy import Policy
from megatron_rl.mcore.step.supervised import SupervisedStep
from megatron_rl.training.learner import TrainingFailed, make_update, sum_over_replicas
from megatron_rl.training.measures import Measures, UpdateOutcome
from megatron_rl.training.supervised.packs import Packs


@dataclasses.dataclass(frozen=True)
class SupervisedUpdate:
    """What an update did."""

    outcome: UpdateOutcome
    measures: Measures
    """This rank's replica's, on the replica's reporting rank; every rank has its own part of the auxiliary losses."""


class SupervisedLearner:
    """Turns packs of demonstrations into updates."""

    def __init__(
        self, policy: Policy, session: Session, updating: Callable[[], AbstractContextManager] = nullcontext
    ) -> None:
        """`updating` is entered while the optimizer steps."""
        self._policy = policy
        self._session = session
        self._updating = updating

    def learn(self, packs: Packs) -> SupervisedUpdate:
        """Make one update; raise before one whose loss is not finite."""
        wrapped = self._policy.wrapped
        reports = run_schedule(SupervisedStep(loss_scale(len(packs))), wrapped, packs)
        losses = torch.stack([report["loss"] for report in reports]).double().tolist() if reports else []
        self._session.run_or_raise_everywhere(lambda: _check(losses))
        num_targets = sum(pack.num_targets for pack in packs)
        denominator = sum_over_replicas(self._session, num_targets)
        outcome = make_update(self._policy, denominator, self._updating)
        measures = Measures(sums=take_losses())
        if is_reporter():
            measures.merge(_measure(packs, sum(losses)))
        return SupervisedUpdate(outcome, measures)


def _check(losses: Sequence[float]) -> None:
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"the loss of micro-batch {number} is {loss}: nothing was updated; look at --lr, --clip-grad and the "
                "precision"
            )


def _measure(packs: Packs, loss: float) -> Measures:
    computed = [pack.num_tokens for pack in packs]
    num_targets = sum(pack.num_targets for pack in packs)
    sums = {
        "loss": loss,
        "demonstrations": packs.num_demonstrations,
        "micro_batches": len(computed),
        "tokens.computed": sum(computed),
        "tokens.prompt": packs.num_tokens - num_targets,
        "tokens.response": num_targets,
    }
    return Measures(sums={name: float(value) for name, value in sums.items()})
