"""Run updates of the trainer on the emulated device, and note where the host waited inside the schedule."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megatron_rl.algorithm.objective import Objective, RoleLogProbs
from megatron_rl.trainer.data.batch import Batch
from megatron_rl.trainer.loop import learner
from megatron_rl.trainer.mcore.model import frozen
from megatron_rl.trainer.mcore.step.trace import StepTrace
from tests.distributed.grpo_trials import Seen, run_trials
from tests.grpo_problem import Problem, Trial
from tests.rehearsal import device
from tests.rehearsal.streams import Stream, state
from tests.rehearsal.syncs import Sync, log


@dataclasses.dataclass(frozen=True)
class Rehearsed:
    """One rank's part."""

    seen: dict[Trial, list[Seen]]
    syncs: dict[Trial, list[list[Sync]]]
    """The waits of the computing threads in each run of the schedule."""
    reads: dict[Trial, list[list[Sync]]]
    """The waits of the reads after each run."""
    faults: list[str]
    operators: frozenset[str]
    """The names of the operators that floating-point numbers went through."""


def rehearse(problem: Problem, trials: Sequence[Trial], fault: str | None = None) -> Rehearsed:
    """Run the trials, on each rank, with a fault planted."""
    device.operators.clear()
    with _counted() as (runs, reads), FAULTS[fault]() if fault is not None else contextlib.nullcontext():
        seen = run_trials(problem, trials)
    return Rehearsed(seen, _by_trial(trials, runs), _by_trial(trials, reads), state.faults, frozenset(device.operators))


def _by_trial(trials: Sequence[Trial], runs: list[list[Sync]]) -> dict[Trial, list[list[Sync]]]:
    of_runs = iter(runs)
    syncs = {trial: [next(of_runs) for _ in range(trial.num_updates)] for trial in trials}
    assert next(of_runs, None) is None
    return syncs


@contextlib.contextmanager
def _counted() -> Iterator[tuple[list[list[Sync]], list[list[Sync]]]]:
    """Note the host's waits in each run of a schedule that trains, and when its numbers are read.

    The loader's thread waits for its own copies.
    """
    runs: list[list[Sync]] = []
    reads: list[list[Sync]] = []

    def counting(true: Callable[..., Any], found: list[list[Sync]]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with log.during() as syncs:
                returned = true(*arguments, **keywords)
            found.append([sync for sync in syncs if not sync.thread.startswith("batches")])
            return returned

        return call

    with (
        mock.patch.object(learner, "run_schedule", counting(learner.run_schedule, runs)),
        mock.patch.object(learner, "copy_to_host", counting(learner.copy_to_host, reads)),
    ):
        yield runs, reads


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
    return mock.patch.object(Batch, "to", lambda self, device: dataclasses.replace(self, pack=self.pack.to(device)))


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
    "a batch left on the host": _batch_left_on_the_host,
    "a layer computes before it has arrived": _no_wait_for_a_layers_copy,
    "a layer is copied into memory that is still used": _no_wait_before_a_layers_copy,
    "the host's weights change while they are copied": _hosts_weights_changed_while_copied,
}
