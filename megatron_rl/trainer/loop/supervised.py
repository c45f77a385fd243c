"""An iteration of a stage that reads responses, --stage sft or dpo: one update over rows of data, without engines.

Rank 0 has the data, and sends every rank the rows of an update before it begins. Each rank packs the rows of its
replica: `Division.bound_numbers` says which rows micro-batch j of replica r has. A `Task` is what they are trained for:
of demonstrations, the loss is the mean, over the responses' tokens of all replicas, of minus their log-probs
(`Imitation`); `preferences.py` has pairs.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from megatron_rl.command_line.checks import count_interleaved
from megatron_rl.command_line.run import find_pack_multiple
from megatron_rl.config.settings import Settings
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.shared.protocol.slots import Division, Place
from megatron_rl.trainer.data.batch import Batch, build_preparation
from megatron_rl.trainer.data.demonstrations import Demonstration, DemonstrationSource
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.packing import Pack, pack_turns
from megatron_rl.trainer.data.slots import Identity
from megatron_rl.trainer.loop.learner import TrainingFailed, make_update, sum_over_replicas
from megatron_rl.trainer.loop.measures import Evaluator, Learned, Measures, UpdateOutcome, describe_auxiliary
from megatron_rl.trainer.loop.rank import Rank
from megatron_rl.trainer.loop.reporter import RunLog, open_log
from megatron_rl.trainer.loop.saver import StartPoint
from megatron_rl.trainer.loop.trainer import Stage
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.auxiliary import take_losses
from megatron_rl.trainer.mcore.step.forward_step import (
    ForwardStep,
    Report,
    SupervisedStep,
    compute_log_probs,
    is_reporter,
    loss_scale,
    run_schedule,
)
from megatron_rl.trainer.mcore.step.policy import FrozenModel, Policy

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.step.trace import StepTrace

# The module that only --stage dpo imports.
_PREFERENCES = "megatron_rl.trainer.loop.preferences"


class Task(Protocol):
    """The objective of a stage, whose micro-batches are packs."""

    name: str
    """The name of a micro-batch's rows in metrics."""

    def pack(self, rows: Sequence[Any], index: int, packer: "Packer") -> Pack | Batch:
        """Lay out the rows of the micro-batch of this index, on the host."""
        ...

    def make_step(self, scale: float, trace: "StepTrace | None") -> ForwardStep:
        """Return the functions that the schedule calls for each micro-batch."""
        ...

    def read(self, reports: Sequence[Report]) -> list[Mapping[str, float]]:
        """Return the sums of each micro-batch, `loss` among them."""
        ...

    def count_share(self, packs: "Packs") -> int:
        """Count a replica's share of the update's denominator."""
        ...

    def measure_held_out(self, packs: "Packs", policy: Policy) -> Mapping[str, float]:
        """Compute the sums of a replica's held-out rows; empty on ranks that do not report."""
        ...

    def describe(self, sums: Mapping[str, float]) -> dict[str, Any]:
        """Return the metrics of an update from the sums of all replicas."""
        ...

    def describe_held_out(self, sums: Mapping[str, float]) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Packer:
    """Makes a pack of rows, the same on every rank."""

    copier: DeviceCopier
    multiple_of: int
    """The buffer's length is padded to a multiple of this."""
    vocab_size: int
    num_parts: int
    """The number of ranks that share a pack's rows."""
    prepare: Callable[[Layout], object]
    """Makes the tables that the attention looks up for a layout."""
    packing: Callable[[], AbstractContextManager] = nullcontext
    """Context of the making of a pack, and of giving it to the schedule."""

    def finish(self, pack: Pack) -> Pack:
        """Make the tables of a pack, and divide it over the ranks that share it."""
        self.prepare(pack.layout)
        return pack.divided(self.num_parts) if self.num_parts > 1 else pack

    def pack(self, task: Task, rows: Sequence[Any], index: int) -> Pack | Batch:
        """Make a micro-batch on the device; without a row it consists of padding."""
        with self.packing():
            packed = task.pack(rows, index, self)
            pack = packed.pack if isinstance(packed, Batch) else packed
            copied, arrival = self.copier.copy(packed, pack.layout)
            arrival.wait()
            return copied


class Imitation:
    """The task of --stage sft."""

    name = "demonstrations"

    def pack(self, rows: Sequence[Demonstration], index: int, packer: Packer) -> Pack:
        sequences = [turns for one in rows for turns in one.sequences]
        return packer.finish(pack_turns(sequences, packer.multiple_of, packer.vocab_size))

    def make_step(self, scale: float, trace: "StepTrace | None") -> ForwardStep:
        return SupervisedStep(scale, trace)

    def read(self, reports: Sequence[Report]) -> list[Mapping[str, float]]:
        losses = torch.stack([report["loss"] for report in reports]).double().tolist() if reports else []
        return [{"loss": loss} for loss in losses]

    def count_share(self, packs: "Packs") -> int:
        return packs.num_targets

    def measure_held_out(self, packs: "Packs", policy: Policy) -> Mapping[str, float]:
        log_probs = compute_log_probs(policy.wrapped, packs)
        if not is_reporter():
            return {}
        loss = -sum(float(of_pack_N.double().sum()) for of_pack_N in log_probs)
        return {"loss": loss, "num_tokens": sum(map(len, log_probs)), "num_demonstrations": packs.num_rows}

    def describe(self, sums: Mapping[str, float]) -> dict[str, Any]:
        return {}

    def describe_held_out(self, sums: Mapping[str, float]) -> dict[str, Any]:
        counts = {name: int(sums[name]) for name in ("num_demonstrations", "num_tokens")}
        return {"loss": sums["loss"] / sums["num_tokens"], **counts}


def build_packer(
    settings: Settings, copier: DeviceCopier, packing: Callable[[], AbstractContextManager] = nullcontext
) -> Packer:
    return Packer(
        copier,
        find_pack_multiple(settings),
        settings.architecture.vocab_size,
        settings.transformer.context_parallel_size,
        build_preparation(settings, copier.device),
        packing,
    )


class Packs:
    """A replica's micro-batches in one run of the schedule.

    All are made before it, on the thread that computes; each takes one copy, for which the host does not wait.
    """

    def __init__(self, parts: Sequence[Sequence[Demonstration]], packer: Packer, task: Task):
        self._parts = parts
        self._packer = packer
        self._packs = [packer.pack(task, part, index) for index, part in enumerate(parts)]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Pack | Batch]:
        for pack in self._packs:
            with self._packer.packing():
                # Entered for the timeline alone: giving a pack is progress of a long update.
                pass
            yield pack

    @property
    def num_rows(self) -> int:
        return sum(map(len, self._parts))

    @property
    def num_targets(self) -> int:
        """The number of tokens that are trained on."""
        return sum(pack.num_targets for pack in self._packs)

    @property
    def num_computed(self) -> int:
        """The number of tokens that go through the model, padding included."""
        return sum(pack.num_tokens for pack in self._packs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all rows, without padding."""
        return sum(one.num_tokens for part in self._parts for one in part)


@dataclasses.dataclass(frozen=True)
class SupervisedStage(Stage):
    run: str
    """The run's name."""
    policy: Policy
    session: Session
    division: Division
    packer: Packer
    source: DemonstrationSource | None
    """The data; on rank 0."""
    largest_micro_batch: int
    """The number of tokens that a micro-batch may have."""
    task: Task = Imitation()
    log: RunLog = dataclasses.field(default_factory=RunLog)
    evaluator: Evaluator = Evaluator()
    rates: ClassVar[Mapping[str, str]] = {"trained": "tokens.computed"}

    def publish(self, version: int) -> Identity:
        return Identity(self.run, version, "")

    def learn(self, identity: Identity) -> Learned:
        with self.log.phase("train"):
            with self.log.timeline.span("pack"):
                packs = self.take()
            return self._update(packs)

    def describe(self, learned: Learned, measures: Measures) -> dict[str, Any]:
        metrics = compute_supervised_metrics(measures, learned.updates[-1], self.largest_micro_batch, self.task)
        assert self.source is not None
        return metrics | {"epochs": self.source.epochs}

    def take(self) -> Packs:
        """Return the packs of the replica's part of the next update."""
        division, replica = self.division, self.session.replica
        taken = self.session.broadcast(None if self.source is None else self.source.take(division.plan.num_prompts))
        assert taken is not None
        numbers = [division.bound_numbers(Place(replica, index)) for index in range(division.slots_per_update)]
        return Packs([[taken[number] for number in of_slot] for of_slot in numbers], self.packer, self.task)

    def _update(self, packs: Packs) -> Learned:
        """Make one update; raise before one whose loss is not finite."""
        timeline = self.log.timeline
        with timeline.part("schedule"):
            step = self.task.make_step(loss_scale(len(packs)), self.log.trace.steps)
            sums = self.task.read(run_schedule(step, self.policy.wrapped, packs))
        with timeline.part("agree"):
            self.session.run_or_raise_everywhere(lambda: _check([one["loss"] for one in sums]))
        with timeline.part("optimizer"):
            denominator = sum_over_replicas(self.session, self.task.count_share(packs))
            outcome = make_update(self.policy, denominator, lambda: timeline.span("update"))
        measures = Measures(sums=take_losses(self.policy.chunks[0].architecture.num_expert_layers))
        if is_reporter():
            measures.merge(_measure(packs, self.task.name))
            for of_pack in sums:
                measures.merge(Measures(sums=dict(of_pack)))
        return Learned([outcome], measures)


def evaluate_held_out(
    policy: Policy, session: Session, parts: Sequence[Sequence[Demonstration]], packer: Packer, task: Task
) -> dict[str, Any]:
    """Compute the metrics of held-out rows on all ranks together; `parts` are the micro-batches of this replica."""
    policy.synchronize()
    measures = Measures()
    for of_rank in session.gather(task.measure_held_out(Packs(parts, packer, task), policy)):
        measures.merge(Measures(sums=dict(of_rank)))
    return task.describe_held_out(measures.sums)


def compute_supervised_metrics(
    measures: Measures, outcome: UpdateOutcome, largest_micro_batch: int, task: Task
) -> dict[str, Any]:
    """Compute the metrics of an iteration from all replicas' measures."""
    sums = measures.sums
    metrics: dict[str, Any] = {
        "loss": sums["loss"] / outcome.denominator,
        task.name: int(sums[task.name]),
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
    return metrics | task.describe(sums) | describe_auxiliary(sums)


def _check(losses: Sequence[float]) -> None:
    for number, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise TrainingFailed(
                f"the loss of micro-batch {number} is {loss}: nothing was updated; look at --lr, --clip-grad and the "
                "precision"
            )


def _measure(packs: Packs, name: str) -> Measures:
    sums = {
        name: packs.num_rows,
        "micro_batches": len(packs),
        "tokens.computed": packs.num_computed,
        "tokens.prompt": packs.num_tokens - packs.num_targets,
        "tokens.response": packs.num_targets,
    }
    return Measures(sums={name: float(value) for name, value in sums.items()})


def build_supervised(
    rank: Rank,
    source: DemonstrationSource | None,
    policy: Policy,
    others: Mapping[str, FrozenModel],
    start: StartPoint,
) -> SupervisedStage:
    """Build the stage. Only rank 0 has the source."""
    settings, session = rank.settings, rank.session
    task: Task = Imitation()
    if settings.run.stage == "dpo":
        task = importlib.import_module(_PREFERENCES).Comparison.build(
            settings.preference, settings.training.seq_length, policy, others
        )
    log = open_log(rank, start.version)
    packer = build_packer(settings, DeviceCopier(session.platform), lambda: log.timeline.span("pack"))
    return SupervisedStage(
        run=settings.name,
        policy=policy,
        session=session,
        division=settings.sizes.division,
        packer=packer,
        source=source,
        largest_micro_batch=settings.sizes.largest_micro_batch,
        task=task,
        log=log,
        evaluator=_build_evaluator(rank, source, policy, packer, task),
    )


def _build_evaluator(
    rank: Rank, source: DemonstrationSource | None, policy: Policy, packer: Packer, task: Task
) -> Evaluator:
    settings, session = rank.settings, rank.session
    if not settings.is_evaluated:
        return Evaluator()
    held_out = session.broadcast(None if source is None else source.held_out(settings.evaluation.num_prompts))
    assert held_out is not None
    is_interleaved = settings.parallel_sizes.virtual_pipeline is not None
    count_of_turn = count_interleaved(settings) if is_interleaved else 1
    parts = divide_held_out(held_out, settings.training.micro_batch_size, session, count_of_turn)
    return Evaluator(settings.evaluation.interval, lambda _: evaluate_held_out(policy, session, parts, packer, task))


def divide_held_out(
    held_out: Sequence[Demonstration], micro_batch_size: int, session: Session, count_of_turn: int
) -> list[Sequence[Demonstration]]:
    """Divide held-out demonstrations over the replicas; return this one's micro-batches, of which some may be empty.

    Each replica has the same number of them, a multiple of `count_of_turn`, which virtual stages compute alternately.
    """
    replicas = session.num_replicas
    parts = [held_out[first : first + micro_batch_size] for first in range(0, len(held_out), micro_batch_size)]
    of_replica = -(-len(parts) // (replicas * count_of_turn)) * count_of_turn
    parts += [()] * (of_replica * replicas - len(parts))
    return parts[session.replica :: replicas]
