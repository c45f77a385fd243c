"""Reasons to doubt a prediction: the errors of earlier ones, and settings outside of the ranges that runs cover."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_rl.analysis.plan.calibrate import MeasuredRun, calibrate
from megatron_rl.analysis.plan.costs import BatchingCosts, Costs, EngineCosts, Setting
from megatron_rl.analysis.plan.simulate import simulate

# A run's costs also hold a little beyond its own range.
_MARGIN = 1.5
_SIMULATED = 20
NO_RUN = (
    "unreliable times: they come from data sheets and assumed shares of them, not from a measured run; use "
    "them to compare splits, and run one before you rely on it"
)

RANGES: Mapping[str, Callable[[Setting], float]] = {
    "responses an iteration": lambda setting: setting.num_prompts * setting.group_size,
    "responses a micro-batch": lambda setting: setting.micro_batch_size,
    "tokens of a prompt": lambda setting: setting.prompts.mean,
    "tokens of a response": lambda setting: setting.responses.mean,
    "responses of an iteration for each engine": lambda setting: (
        setting.num_prompts * setting.group_size / setting.num_engines
    ),
    "devices": lambda setting: setting.num_devices,
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The seconds of a run's iteration, predicted from the other runs and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def leave_one_out(runs: Sequence[MeasuredRun]) -> list[Prediction]:
    """Predict each run from all others. Return nothing for a single run, since it has no others."""
    found = []
    for place, run in enumerate(runs):
        others = [*runs[:place], *runs[place + 1 :]]
        if others:
            costs = apply_bounds(run, calibrate(others))
            predicted = simulate(run.setting, costs, _SIMULATED).seconds
            found.append(Prediction(run.record.name, predicted, run.record.iteration_seconds))
    return found


def apply_bounds(run: MeasuredRun, costs: Costs) -> Costs:
    """Return the costs with the run's own bounds of how many responses its engines sample at once."""
    engine: EngineCosts = dataclasses.replace(costs.engine, max_in_flight=run.layout.max_in_flight)
    if isinstance(engine, BatchingCosts):
        engine = dataclasses.replace(engine, max_running=run.layout.max_running, is_chosen=run.layout.is_chosen)
    return dataclasses.replace(costs, engine=engine)


def find_doubts(setting: Setting, runs: Sequence[MeasuredRun], engine: EngineCosts | None = None) -> Iterator[str]:
    """Yield reasons why a prediction for this setting is unreliable; none if the runs cover it."""
    if not runs:
        yield NO_RUN
        return
    if isinstance(engine, BatchingCosts):
        bounds = {run.layout.max_running for run in runs}
        if len(bounds) == 1 and engine.max_running not in bounds:
            yield (
                f"unreliable: all runs sampled up to {min(bounds)} responses at once, so they do not show how "
                f"long {engine.max_running} take: run one with --rollout-max-num-seqs {engine.max_running}"
            )
    elif any(run.layout.is_chosen for run in runs):
        yield (
            "note: the sidecar chose how many responses were in flight, and plan does not for scripted engines "
            f"without step_seconds: it assumes {runs[0].layout.max_in_flight}, or the N of --rollout-max-in-flight N"
        )
    seen = [run.setting for run in runs]
    for name, read in RANGES.items():
        values = [read(one) for one in seen]
        value, least, most = read(setting), min(values), max(values)
        if not least / _MARGIN <= value <= most * _MARGIN:
            covered = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            yield f"unreliable: {value:g} {name}, and the runs cover {covered}: run one that is nearer"
    stages = {one.num_stages for one in seen}
    if setting.num_stages not in stages:
        yield (
            f"unreliable: no run had {setting.num_stages} pipeline stages, so they are assumed to divide the "
            "layers evenly and not to disturb each other"
        )
    schedules = {one.schedule for one in seen}
    if setting.schedule not in schedules:
        yield f"note: no run had the schedule {setting.schedule}, so its time is derived from its parts"
    if len(runs) == 1:
        yield "note: one run cannot show the error of a prediction: name a second one to measure it"


def describe_errors(predictions: Sequence[Prediction]) -> list[str]:
    """Describe the errors of predicting each run from the others."""
    if not predictions:
        return []
    errors = sorted(abs(one.error) for one in predictions)
    lines = ["each run, predicted from all others:"]
    lines += [
        f"  {one.name:<24}{one.predicted:>9.2f} s predicted{one.measured:>9.2f} s measured{one.error:>+8.1%}"
        for one in predictions
    ]
    middle = errors[len(errors) // 2] if len(errors) % 2 else sum(errors[len(errors) // 2 - 1 :][:2]) / 2
    return [*lines, f"  error: {middle:.1%} median, {errors[-1]:.1%} worst"]
