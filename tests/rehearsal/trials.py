"""Run updates of the trainer on the emulated device, and note where the host waited inside the schedule."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.objective import Objective
from megatron_rl.shared.protocol.wire import Slot
from megatron_rl.trainer.data.batch import Batch, Batcher
from megatron_rl.trainer.data.device_copier import DeviceCopier, PendingCopy
from megatron_rl.trainer.loop import learner
from megatron_rl.trainer.mcore.model import frozen
from megatron_rl.trainer.mcore.step.trace import StepTrace
from tests.distributed.grpo_trials import Seen, run_trials
from tests.grpo_problem import Problem, Trial
from tests.rehearsal import device
from tests.rehearsal.streams import Stream, state
from tests.rehearsal.syncs import Copy, Sync, log


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """One rank's part."""

    seen: dict[Trial, list[Seen]]
    syncs: dict[Trial, list[list[Sync]]]
    """The waits of all threads in each run of the schedule."""
    reads: dict[Trial, list[list[Sync]]]
    """The waits of the reads after each run."""
    faults: list[str]
    operators: frozenset[str]
    """The names of the operators that floating-point numbers went through."""
    loader: list[Sync | Copy]
    """The waits and the copies to the device of the thread that makes batches."""
    num_batches: int
    """The number of batches that were made."""


def rehearse(problem: Problem, trials: Sequence[Trial], fault: str | None = None) -> Rehearsed:
    """Run the trials, on each rank, with a fault planted."""
    device.operators.clear()
    with (
        _counted() as (runs, reads),
        _counted_batches() as made,
        FAULTS[fault]() if fault is not None else contextlib.nullcontext(),
    ):
        seen = run_trials(problem, trials)
    return Rehearsed(
        seen,
        _by_trial(trials, runs),
        _by_trial(trials, reads),
        state.faults,
        frozenset(device.operators),
        [one for one in (*log.all, *log.copies) if one.thread.startswith("batches")],
        len(made),
    )


def _by_trial(trials: Sequence[Trial], runs: list[list[Sync]]) -> dict[Trial, list[list[Sync]]]:
    of_runs = iter(runs)
    syncs = {trial: [next(of_runs) for _ in range(trial.num_updates)] for trial in trials}
    assert next(of_runs, None) is None
    return syncs


@contextlib.contextmanager
def _counted() -> Iterator[tuple[list[list[Sync]], list[list[Sync]]]]:
    """Note the host's waits in each run of a schedule that trains, and when its numbers are read."""
    runs: list[list[Sync]] = []
    reads: list[list[Sync]] = []

    def counting(true: Callable[..., Any], found: list[list[Sync]]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with log.during() as syncs:
                returned = true(*arguments, **keywords)
            found.append(syncs)
            return returned

        return call

    with (
        mock.patch.object(learner, "run_schedule", counting(learner.run_schedule, runs)),
        mock.patch.object(learner, "copy_to_host", counting(learner.copy_to_host, reads)),
    ):
        yield runs, reads


@contextlib.contextmanager
def _counted_batches() -> Iterator[list[Batch]]:
    """Collect the batches that are made."""
    true, made = Batcher.batch, []

    def batch(self: Batcher, slot: Slot) -> Batch:
        made.append(true(self, slot))
        return made[-1]

    with mock.patch.object(Batcher, "batch", batch):
        yield made


def _item_in_the_loss() -> AbstractContextManager:
    true = Objective.loss

    def loss(self: Objective, log_probs: RoleLogProbs, *tensors: Any) -> Any:
        total, statistics = true(self, log_probs, *tensors)
        total.item()
        return total, statistics

    return mock.patch.object(Objective, "loss", loss)


def _running_sums_in_the_loss() -> AbstractContextManager:
    true = Objective.loss

    def loss(self: Objective, log_probs: RoleLogProbs, *tensors: Any) -> Any:
        log_probs.policy_N.detach().cumsum(0)
        return true(self, log_probs, *tensors)

    return mock.patch.object(Objective, "loss", loss)


def _batch_left_on_the_host() -> AbstractContextManager:
    true = Batch.copy_to_device

    def copy(self: Batch, copier: DeviceCopier) -> Batch:
        return dataclasses.replace(true(self, copier), advantages_S=self.advantages_S)

    return mock.patch.object(Batch, "copy_to_device", copy)


def _pageable_copies() -> AbstractContextManager:
    true = Batch.copy_to_device

    def copy(self: Batch, copier: DeviceCopier) -> Batch:
        return dataclasses.replace(true(self, copier), advantages_S=self.advantages_S.to(copier.device))

    return mock.patch.object(Batch, "copy_to_device", copy)


def _no_wait_for_a_batch() -> AbstractContextManager:
    return mock.patch.object(PendingCopy, "wait")


def _no_wait_for_a_layers_copy() -> AbstractContextManager:
    return mock.patch.object(Stream, "wait_event")


def _hosts_weights_changed_while_copied() -> AbstractContextManager:
    true = frozen._OffloadedPart.fetch

    def fetch(self: Any, queue: Any) -> None:
        is_new = not self._copies
        true(self, queue)
        if is_new:
            self._host[0].add_(1)

    return mock.patch.object(frozen._OffloadedPart, "fetch", fetch)


def _no_wait_before_a_layers_copy() -> AbstractContextManager:
    return mock.patch.object(Stream, "wait_stream")


def _marks_read_at_once() -> AbstractContextManager:
    true = StepTrace._end

    def end(self: Any) -> Any:
        mark = true(self)
        self._platform.seconds_between(mark, mark)
        return mark

    return mock.patch.object(StepTrace, "_end", end)


FAULTS = {
    "the time of a pass read at once": _marks_read_at_once,
    "an item() in the loss": _item_in_the_loss,
    "running sums in the loss": _running_sums_in_the_loss,
    "a tensor of a batch left on the host": _batch_left_on_the_host,
    "a tensor of a batch copied by itself": _pageable_copies,
    "a batch is used before it has arrived": _no_wait_for_a_batch,
    "a layer computes before it has arrived": _no_wait_for_a_layers_copy,
    "a layer is copied into memory that is still used": _no_wait_before_a_layers_copy,
    "the host's weights change while they are copied": _hosts_weights_changed_while_copied,
}
