"""An update over demonstrations: the mean of minus the log-probs of the responses' tokens, over all replicas."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from megatron_rl.mcore.session import Session
from megatron_rl.mcore.step.auxiliary import take_losses
from megatron_rl.mcore.step.forward_step import SupervisedStep, is_reporter, loss_scale, run_schedule
from megatron_rl.mcore.step.policy import Policy
from megatron_rl.mcore.step.trace import StepTrace
from megatron_rl.observe.timeline import Timeline
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
        self, policy: Policy, session: Session, timeline: Timeline | None = None, trace: StepTrace | None = None
    ) -> None:
        """`trace` notes what is computed when."""
        self._policy = policy
        self._session = session
        self._timeline = timeline or Timeline()
        self._trace = trace

    def learn(self, packs: Packs) -> SupervisedUpdate:
        """Make one update; raise before one whose loss is not finite."""
        wrapped = self._policy.wrapped
        with self._timeline.part("schedule"):
            step = SupervisedStep(loss_scale(len(packs)), self._trace)
            reports = run_schedule(step, wrapped, packs)
            losses = torch.stack([report["loss"] for report in reports]).double().tolist() if reports else []
        with self._timeline.part("agree"):
            self._session.run_or_raise_everywhere(lambda: _check(losses))
        with self._timeline.part("optimizer"):
            denominator = sum_over_replicas(self._session, packs.num_targets)
            outcome = make_update(self._policy, denominator, lambda: self._timeline.span("update"))
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
    sums = {
        "loss": loss,
        "demonstrations": packs.num_demonstrations,
        "micro_batches": len(packs),
        "tokens.computed": packs.num_computed,
        "tokens.prompt": packs.num_tokens - packs.num_targets,
        "tokens.response": packs.num_targets,
    }
    return Measures(sums={name: float(value) for name, value in sums.items()})
