"""An iteration of --stage sft: one update over demonstrations, without engines.

The loss is the mean, over the responses' tokens of all replicas, of minus their log-probs.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_rl.command_line.checks import count_interleaved
from megatron_rl.observe.timeline import Timeline
from megatron_rl.trainer.data.demonstrations import Demonstration, DemonstrationSource
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.slots import Identity
from megatron_rl.trainer.loop.evaluator import Evaluator, NoEvaluator
from megatron_rl.trainer.loop.learner import TrainingFailed, make_update, sum_over_replicas
from megatron_rl.trainer.loop.measures import Learned, Measures, UpdateOutcome, describe_auxiliary
from megatron_rl.trainer.loop.rank import Rank
from megatron_rl.trainer.loop.reporter import RunLog, open_log
from megatron_rl.trainer.loop.saver import RunState, StartPoint
from megatron_rl.trainer.loop.supervised.packs import Demonstrations, Packer, Packs, build_packer, divide_held_out
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.auxiliary import take_losses
from megatron_rl.trainer.mcore.step.forward_step import (
    SupervisedStep,
    compute_log_probs,
    is_reporter,
    loss_scale,
    run_schedule,
)
from megatron_rl.trainer.mcore.step.policy import Policy
from megatron_rl.trainer.mcore.step.trace import StepTrace


@dataclasses.dataclass(frozen=True)
class SupervisedStage:
    """Learns from demonstrations."""

    run: str
    """The run's name."""
    demonstrations: Demonstrations
    learner: "SupervisedLearner"
    largest_micro_batch: int
    """The number of tokens that a micro-batch may have."""
    log: RunLog
    evaluator: Evaluator
    rates: ClassVar[Mapping[str, str]] = {"trained": "tokens.computed"}

    @property
    def state(self) -> RunState:
        return RunState()

    def publish(self, version: int) -> Identity:
        return Identity(self.run, version, "")

    def learn(self, identity: Identity) -> Learned:
        with self.log.phase("train"):
            with self.log.timeline.span("pack"):
                packs = self.demonstrations.take()
            return self.learner.learn(packs)

    def describe(self, learned: Learned, measures: Measures) -> dict[str, Any]:
        metrics = compute_supervised_metrics(measures, learned.updates[-1], self.largest_micro_batch)
        return metrics | {"epochs": self.demonstrations.epochs}

    def list_remarks(self, checkpoint: Path | None) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass


class SupervisedLearner:
    """Turns packs of demonstrations into updates."""

    def __init__(
        self, policy: Policy, session: Session, timeline: Timeline | None = None, trace: StepTrace | None = None
    ) -> None:
        """`trace` records when each pass runs."""
        self._policy = policy
        self._session = session
        self._timeline = timeline or Timeline()
        self._trace = trace

    def learn(self, packs: Packs) -> Learned:
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
        measures = Measures(sums=take_losses(self._policy.chunks[0].architecture.num_expert_layers))
        if is_reporter():
            measures.merge(_measure(packs, sum(losses)))
        return Learned([outcome], measures)


class SupervisedEvaluator:
    """Computes the mean loss over the tokens of held-out responses, on all ranks together."""

    def __init__(
        self, policy: Policy, session: Session, parts: Sequence[Sequence[Demonstration]], packer: Packer, interval: int
    ):
        """`parts` are the micro-batches of this rank's replica."""
        self._policy = policy
        self._session = session
        self._parts = parts
        self._packer = packer
        self._interval = interval

    def is_due(self, version: int, is_last: bool) -> bool:
        return is_last or version % self._interval == 0

    def evaluate(self, identity: Identity) -> dict[str, Any]:
        self._policy.synchronize()
        packs = Packs(self._parts, self._packer)
        log_probs = compute_log_probs(self._policy.wrapped, packs)
        found = (0.0, 0, 0)
        if is_reporter():
            loss = -sum(float(of_pack_N.double().sum()) for of_pack_N in log_probs)
            found = loss, sum(map(len, log_probs)), packs.num_demonstrations
        loss, num_tokens, num_demonstrations = map(sum, zip(*self._session.gather(found), strict=True))
        return {"loss": loss / num_tokens, "num_demonstrations": num_demonstrations, "num_tokens": num_tokens}


def compute_supervised_metrics(measures: Measures, outcome: UpdateOutcome, largest_micro_batch: int) -> dict[str, Any]:
    """Compute the metrics of an iteration from all replicas' measures."""
    sums = measures.sums
    metrics: dict[str, Any] = {
        "loss": sums["loss"] / outcome.denominator,
        "demonstrations": int(sums["demonstrations"]),
        "gradient_norm": outcome.gradient_norm,
        "learning_rate": outcome.learning_rate,
        "skipped_updates": int(not outcome.was_taken),
        "tokens": {
            "prompt": int(sums["tokens.prompt"]),
            "response": int(sums["tokens.response"]),
            "computed": int(sums["tokens.computed"]),
            "utilisation": sums["tokens.computed"] / (sums["micro_batches"] * largest_micro_batch),
        },
    }
    if outcome.gradient_zeros is not None:
        metrics["gradient_zeros"] = outcome.gradient_zeros
    return metrics | describe_auxiliary(sums)


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


def build_supervised(
    rank: Rank, source: DemonstrationSource | None, policy: Policy, start: StartPoint
) -> SupervisedStage:
    """Build the stage. Only rank 0 has the source."""
    settings, session = rank.settings, rank.session
    log = open_log(rank, start.version)
    packer = build_packer(settings, DeviceCopier(session.platform), lambda: log.timeline.span("pack"))
    return SupervisedStage(
        run=settings.name,
        demonstrations=Demonstrations(session, settings.sizes.division, packer, source),
        learner=SupervisedLearner(policy, session, log.timeline, log.trace.steps),
        largest_micro_batch=settings.sizes.largest_micro_batch,
        log=log,
        evaluator=_build_evaluator(rank, source, policy, packer),
    )


def _build_evaluator(rank: Rank, source: DemonstrationSource | None, policy: Policy, packer: Packer) -> Evaluator:
    settings, session = rank.settings, rank.session
    interval = settings.evaluation.interval
    if interval is None or not settings.is_evaluated:
        return NoEvaluator()
    held_out = session.broadcast(None if source is None else source.held_out(settings.evaluation.num_prompts))
    assert held_out is not None
    is_interleaved = settings.parallel_sizes.virtual_pipeline is not None
    count_of_turn = count_interleaved(settings) if is_interleaved else 1
    parts = divide_held_out(held_out, settings.training.micro_batch_size, session, count_of_turn)
    return SupervisedEvaluator(policy, session, parts, packer, interval)
