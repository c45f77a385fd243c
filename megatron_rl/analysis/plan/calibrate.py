"""Costs from runs, fitted to the times at which groups were finished and slots were claimed.

The engines' costs come from a regression over groups. The number of steps that an engine had made when a group was
finished follows from lengths and bounds alone, however long a step takes. The simulator counts the steps by running
with a cost of 1 for one thing and 0 for all others. The trainer's costs come from the times between its claims, where
it did not wait, and their sum from its metrics.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from megatron_rl.analysis.plan.costs import (
    BatchingCosts,
    Costs,
    EngineCosts,
    Schedule,
    ScriptedCosts,
    Setting,
    TrainerCosts,
)
from megatron_rl.analysis.plan.engines import SimulatedBatching, SimulatedGroup
from megatron_rl.analysis.plan.lengths import Empirical, Uniform
from megatron_rl.analysis.plan.pipeline import count_slot, slot_seconds
from megatron_rl.analysis.plan.pool import Pool
from megatron_rl.analysis.plan.records import MicroBatch, RecordedGroup, RecordedIteration, RunRecord, TraceRecord
from megatron_rl.errors import InputError

# A claim that is later than its groups by more than this was late because the trainer had been computing.
_IMMEDIATE_SECONDS = 0.003
# The factor by which one more column must reduce the remaining error.
_WORTH = 1.1
_BATCHING = ("step", "per_sequence", "per_context", "per_prompt_token")


@dataclasses.dataclass(frozen=True)
class RunLayout:
    """The facts about a run that its metrics and its audit log do not contain."""

    schedule: Schedule = "periodic"
    num_stages: int = 1
    num_virtual: int = 1
    engine: Literal["batching", "scripted"] = "batching"
    max_running: int = 64
    """Responses that an engine samples at once, `--rollout-max-num-seqs`."""
    max_in_flight: int = 128
    is_chosen: bool = False
    """True if the sidecar chooses the number of responses in flight, at most `max_in_flight`."""
    step_seconds: tuple[float, float] | None = None
    """Seconds of a decode step and of each response in it, if a script fixes them; None if they are fitted."""
    trainer_devices: int | None = None
    """Devices of the trainer; if not given, one for each stage of each replica."""
    engine_devices: int | None = None
    """Devices of all engines; if not given, one for each engine."""
    num_frozen: int = 0
    is_shared: bool = True
    output_share: float = 0.0
    """The output layer's share of a micro-batch's time. The last stage has that layer besides its own."""


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """A run, its layout, and its trace if it has one."""

    record: RunRecord
    layout: RunLayout
    trace: TraceRecord | None = None

    @property
    def setting(self) -> Setting:
        """Return the run as a setting of the simulator, with the lengths of its own responses."""
        record, layout = self.record, self.layout
        prompt = round(statistics.mean(one.prompt for one in record.iterations))
        return Setting(
            schedule=layout.schedule,
            num_prompts=record.num_prompts,
            group_size=record.group_size,
            micro_batch_size=record.micro_batch_size,
            prompts=Uniform(prompt, prompt),
            responses=Empirical([group.lengths for one in record.iterations for group in one.groups]),
            talk=record.talk,
            num_engines=record.num_engines,
            num_replicas=record.num_replicas,
            num_stages=layout.num_stages,
            num_virtual=layout.num_virtual,
            num_updates=record.num_updates,
            trainer_devices=layout.trainer_devices or record.num_replicas * layout.num_stages,
            engine_devices=layout.engine_devices or record.num_engines,
            is_shared=layout.is_shared,
            in_prompt_order=record.in_prompt_order,
        )


def calibrate(runs: Sequence[MeasuredRun]) -> Costs:
    """Fit costs to runs; all must have engines of one kind."""
    if len({run.layout.engine for run in runs}) > 1:
        raise InputError("runs with scripted engines and runs with others cannot be mixed: name runs of one kind")
    iterations = [one for run in runs for one in run.record.iterations]
    return Costs(
        engine=_fit_engine(runs),
        trainer=_fit_trainer(runs),
        publish=_median(iterations, "publish"),
        other=_median(iterations, "other"),
    )


def _median(iterations: Iterable[RecordedIteration], name: str) -> float:
    return statistics.median(one.seconds.get(name, 0.0) for one in iterations)


# The engines.


def _fit_engine(runs: Sequence[MeasuredRun]) -> EngineCosts:
    if runs[0].layout.engine == "scripted":
        return _fit_scripted(runs)
    layout = runs[0].layout
    step, per_sequence, per_context, per_prompt_token = _read_steps(runs) or _fit_steps(runs)
    return BatchingCosts(
        step=step,
        per_sequence=per_sequence,
        per_context=per_context,
        per_prompt_token=per_prompt_token,
        max_running=layout.max_running,
        max_in_flight=layout.max_in_flight,
        is_chosen=layout.is_chosen,
    )


def _read_steps(runs: Sequence[MeasuredRun]) -> list[float] | None:
    """Return the costs that the scripts of the runs' engines fix; None if the engines have no such script."""
    scripts = {run.layout.step_seconds for run in runs}
    if len(scripts) > 1:
        raise InputError(
            "runs whose engines have different step_seconds, or none, cannot be mixed: name runs with one script"
        )
    (known,) = scripts
    return None if known is None else [*known, 0.0, 0.0]


def _fit_steps(runs: Sequence[MeasuredRun]) -> list[float]:
    rows, seconds = [], []
    for run in runs:
        for iteration, groups in _by_engine(run.record):
            counted = [_replay(run, iteration, groups, name) for name in _BATCHING]
            # How long environments take is known.
            answered = _replay(run, iteration, groups, None)
            for group in groups:
                rows.append([times[group.index] for times in counted])
                seconds.append(group.finished - iteration.submitted - answered[group.index])
    return fit(rows, seconds)


def _by_engine(record: RunRecord) -> Iterator[tuple[RecordedIteration, list[RecordedGroup]]]:
    """Yield each iteration with the groups that one engine sampled, in the order in which they were begun."""
    for iteration in record.iterations:
        by_index = sorted(iteration.groups, key=lambda group: group.index)
        for engine in sorted({group.engine for group in by_index}):
            yield iteration, [group for group in by_index if group.engine == engine]


def _replay(
    run: MeasuredRun, iteration: RecordedIteration, groups: Sequence[RecordedGroup], cost: str | None
) -> dict[int, float]:
    """Return when an engine has sampled each group if only the thing `cost` takes time, 1 each.

    Without one, only environments take theirs.
    The delays of an iteration's first groups are left out.
    """
    only = {name: float(name == cost) for name in _BATCHING}
    costs = BatchingCosts(
        step=only["step"],
        per_sequence=only["per_sequence"],
        per_context=only["per_context"],
        per_prompt_token=only["per_prompt_token"],
        max_running=run.layout.max_running,
        max_in_flight=iteration.max_in_flight or run.layout.max_in_flight,
    )
    prompt = round(iteration.prompt)
    talk = run.record.talk if cost is None else dataclasses.replace(run.record.talk, seconds=0.0)
    pool = Pool([SimulatedBatching(costs)], costs.max_in_flight, 0.0, 1, talk)
    pool.submit([SimulatedGroup(group.index, 0, prompt, list(group.lengths)) for group in groups], 0.0)
    return {group.index: group.sampled for group in pool.take(len(groups))}


def _fit_scripted(runs: Sequence[MeasuredRun]) -> ScriptedCosts:
    if any(run.record.talk.is_needed for run in runs):
        raise InputError(
            "a run with --rollout-env and scripted engines needs a script with step_seconds: its groups have no "
            "durations of their own; name another run"
        )
    rows, seconds = [], []
    for run in runs:
        at_once = max(1, run.layout.max_in_flight // run.record.group_size)
        for iteration, groups in _by_engine(run.record):
            ends = sorted(group.finished for group in groups)
            begun = [iteration.submitted] * at_once + ends
            for place, group in enumerate(groups):
                in_flight = min(place + 1, at_once)
                rows.append([1.0, sum(group.lengths) * in_flight])
                seconds.append(group.finished - begun[place])
    delay, of_token = fit(rows, seconds)
    errors = [measured - delay - row[1] * of_token for row, measured in zip(rows, seconds, strict=True)]
    # The deviation of values drawn evenly from an interval is its length over the square root of 12.
    half = min(delay, math.sqrt(3) * statistics.pstdev(errors))
    return ScriptedCosts(
        tokens_per_second=1 / of_token if of_token else None,
        delay=(delay - half, delay + half),
        max_in_flight=runs[0].layout.max_in_flight,
    )


# The trainer.


def _fit_trainer(runs: Sequence[MeasuredRun]) -> TrainerCosts:
    shape = _fit_shape(runs)
    iterations = [(run, one) for run in runs for one in run.record.iterations]
    # All parts are scaled so that they add up to the seconds in the metrics.
    measured = sum(_busy_seconds(run, one) for run, one in iterations)
    counted = sum(_count(run, one, shape) for run, one in iterations)
    scale = measured / counted
    of_update = statistics.median(one.seconds.get("update", 0.0) / run.record.num_updates for run, one in iterations)
    return dataclasses.replace(
        shape,
        per_token=shape.per_token * scale,
        per_micro_batch=shape.per_micro_batch * scale,
        per_pair=shape.per_pair * scale,
        backward_share=_backward_share(runs),
        output_share=runs[0].layout.output_share,
        num_frozen=runs[0].layout.num_frozen,
        update=of_update,
    )


def _fit_shape(runs: Sequence[MeasuredRun]) -> TrainerCosts:
    """Fit a micro-batch's time to its content. If the runs show too little for that, all time goes to its tokens."""
    rows, seconds = [], []
    for run in runs:
        for iteration in run.record.iterations:
            for counted, measured in _traced(run, iteration) if run.trace else _computed(run, iteration):
                rows.append([counted[0], 1.0, counted[1]])
                seconds.append(measured)
    tokens = [row[0] for row in rows]
    # Without a spread, the costs of a token and of a micro-batch cannot be told apart.
    if len(rows) < 8 or max(tokens) < 1.3 * min(tokens):
        return TrainerCosts(per_token=1.0)
    of_token, of_slot, of_pair = fit(rows, seconds)
    if not of_token and not of_pair:
        return TrainerCosts(per_token=1.0)
    return TrainerCosts(per_token=of_token, per_micro_batch=of_slot, per_pair=of_pair)


def _computed(run: MeasuredRun, iteration: RecordedIteration) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield each micro-batch's tokens and pairs, and the seconds for which the rank computed it.

    Slot i + 1 is asked for when slot i is waited for. So micro-batch i was computed from claim i + 1 to claim i + 2,
    if both claims came later than the groups that they took.
    """
    if run.layout.num_stages > 1 or run.layout.schedule != "periodic" or run.record.num_updates > 1:
        return
    by_index = {group.index: group for group in iteration.groups}
    for replica in range(run.record.num_replicas):
        claims = sorted((one for one in iteration.claims if one.replica == replica), key=lambda one: one.index)
        late = [one.time > max(by_index[index].finished for index in one.groups) + _IMMEDIATE_SECONDS for one in claims]
        for place in range(len(claims) - 2):
            if late[place + 1] and late[place + 2] and run.record.micro_batch_size >= run.record.group_size:
                groups = [(round(iteration.prompt), by_index[index].lengths) for index in claims[place].groups]
                counted = count_slot(groups, run.layout.is_shared)
                yield counted, claims[place + 2].time - claims[place + 1].time


def _traced(run: MeasuredRun, iteration: RecordedIteration) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the same from the trace, for every micro-batch."""
    assert run.trace is not None
    by_index = {group.index: group for group in iteration.groups}
    claimed = {(one.replica, one.index): one.groups for one in iteration.claims}
    for one in run.trace.micro_batches:
        groups = claimed.get((one.replica, one.slot), ())
        if one.version == iteration.version and groups and run.record.micro_batch_size >= run.record.group_size:
            counted = count_slot(
                [(round(iteration.prompt), by_index[index].lengths) for index in groups], run.layout.is_shared
            )
            yield counted, one.forward + one.backward


def _backward_share(runs: Sequence[MeasuredRun]) -> float:
    """Return the backward pass's share of the traced seconds; without a trace, two thirds."""
    traced: list[MicroBatch] = [one for run in runs if run.trace for one in run.trace.micro_batches]
    backward, both = sum(one.backward for one in traced), sum(one.forward + one.backward for one in traced)
    return backward / both if both else 2 / 3


def _busy_seconds(run: MeasuredRun, iteration: RecordedIteration) -> float:
    """Return the seconds for which all stages computed, from the slowest one: the schedule's time less its bubble."""
    slots, stages = run.setting.slots, run.layout.num_stages
    bubble = (stages - 1) / run.layout.num_virtual
    share = (1 - run.layout.output_share) / stages + run.layout.output_share
    whole = iteration.seconds["train"] * slots / (slots + bubble) / share
    # Frozen models add a forward pass each, a third of the policy's.
    return whole * run.record.num_replicas / (1 + run.layout.num_frozen / 3)


def _count(run: MeasuredRun, iteration: RecordedIteration, costs: TrainerCosts) -> float:
    """Count the seconds that the iteration's micro-batches take at these costs."""
    per_slot = max(1, run.record.group_size // run.record.micro_batch_size)
    total = 0.0
    for group in iteration.groups:
        size = len(group.lengths) // per_slot
        for part in _parts(group.lengths, size):
            tokens, pairs = count_slot([(round(iteration.prompt), part)], run.layout.is_shared)
            total += slot_seconds(costs, tokens, pairs) - costs.per_micro_batch
    return total + costs.per_micro_batch * run.setting.slots * run.record.num_replicas * run.record.num_updates


def _parts(lengths: Sequence[int], size: int) -> list[Sequence[int]]:
    return [lengths[first : first + size] for first in range(0, len(lengths), size)]


def fit(rows: Sequence[Sequence[float]], values: Sequence[float], num_preferred: int = 2) -> list[float]:
    """Fit factors of at least 0 to the rows by least squares, then fit again without the outliers.

    Runs are noisy, and their columns grow together. So a column after the preferred ones, which come first, is used
    only if it reduces the remaining error by a tenth.
    """
    table, wanted = np.asarray(rows, dtype=np.float64), np.asarray(values, dtype=np.float64)
    found = _fit_not_negative(table, wanted, num_preferred)
    errors = np.abs(table @ found - wanted)
    near = errors <= 4 * max(float(np.median(errors)), 1e-9)
    if near.sum() > 2 * table.shape[1]:
        found = _fit_not_negative(table[near], wanted[near], num_preferred)
    return [float(one) for one in found]


def _fit_not_negative(table: np.ndarray, wanted: np.ndarray, num_preferred: int) -> np.ndarray:
    """Try every choice of columns, since they are few."""
    best, least = np.zeros(table.shape[1]), math.inf
    scale = np.abs(table).max(axis=0)
    scale[scale == 0] = 1.0
    for count in range(1, table.shape[1] + 1):
        for columns in itertools.combinations(range(table.shape[1]), count):
            chosen = list(columns)
            part, *_ = np.linalg.lstsq(table[:, chosen] / scale[chosen], wanted, rcond=None)
            error = float(np.square(table[:, chosen] / scale[chosen] @ part - wanted).sum())
            error *= _WORTH ** sum(column >= num_preferred for column in chosen)
            if (part >= 0).all() and error < least:
                best, least = np.zeros(table.shape[1]), error
                best[chosen] = part / scale[chosen]
    return best
