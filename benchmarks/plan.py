"""Measure how well the planner predicts, and how fast: calibrated on one run it predicts others, which run after it.

Runs are real, with a small model on a CPU; their engines are scripted, so they sample in timers' time and need no
core. With `--vllm` they are vLLM's, each on a core beside the trainer's, and two runs calibrate. Predictions are
written to a file before anything but the calibrating runs is measured:

    python -m benchmarks.plan --predict FILE       the calibrating run, and the predictions that follow from it
    python -m benchmarks.plan --measure FILE       the other runs, beside what the file says

Without either, both, one after the other. The error of a setting is its predicted iteration over the median of the
measured ones, less 1. The calibrating run is measured again at the end: its difference is the machine's noise.
The printed load belongs to the machine, in processes that want a core.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from megatron_rl.analysis.plan.calibrate import MeasuredRun, calibrate
from megatron_rl.analysis.plan.costs import BatchingCosts, Costs, Schedule, ScriptedCosts, Setting, TrainerCosts
from megatron_rl.analysis.plan.lengths import Lognormal, Uniform
from megatron_rl.analysis.plan.runs import read_run
from megatron_rl.analysis.plan.simulate import simulate

ITERATIONS, SIMULATED = 6, 60
MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
SEQ_LENGTH = 512
AGAIN = "the calibrating run again"
SLOW, FAST = 1000.0, 24000.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run. Its fields that equal the calibrating run's are left out."""

    speed: float | None = 3000.0
    """Tokens a second of a scripted engine; None for vLLM's."""
    lengths: tuple[int, int] = (16, 240)
    delay: tuple[float, float] = (0.0, 0.0)
    prompts: int = 12
    group_size: int = 8
    engines: int = 2
    in_flight: int = 32
    stages: int = 1
    replicas: int = 1
    schedule: Schedule = "periodic"


BASE = Trial()
# Sampling takes most of the time, so that other work of the machine changes little.
ENGINES_BOUND = {
    "engines a third as fast": Trial(SLOW),
    "groups of 4": Trial(SLOW, group_size=4, prompts=24),
    "groups of 16": Trial(SLOW, group_size=16, prompts=6),
    "short responses": Trial(SLOW, (8, 96), prompts=30),
    "long responses": Trial(SLOW, (120, 400), prompts=6),
    "one engine": Trial(2 * SLOW, engines=1),
    "four engines": Trial(SLOW / 2, engines=4),
    "a group at a time": Trial(SLOW, in_flight=8),
    "groups that wait": Trial(FAST, delay=(1.0, 6.0), in_flight=64),
    "synchronous, slow engines": Trial(SLOW, schedule="sync"),
    "two stages, slow engines": Trial(SLOW, stages=2),
    "two replicas, slow engines": Trial(SLOW, replicas=2),
}
TRAINER_BOUND = {
    "fast engines": Trial(FAST, prompts=24),
    "fast engines, groups of 4": Trial(FAST, group_size=4, prompts=48),
    "fast engines, long responses": Trial(FAST, (120, 400), prompts=12),
    "fast engines, two stages": Trial(FAST, prompts=24, stages=2),
    "synchronous": Trial(schedule="sync"),
}
VLLM = Trial(None, (80, 80), prompts=24, engines=1)
# A smaller batch, which shows the time of a step apart from its tokens.
VLLM_BASES = {"calibrating": VLLM, "calibrating, fewer at once": dataclasses.replace(VLLM, in_flight=8, prompts=12)}
OF_VLLM = {
    "groups of 4": dataclasses.replace(VLLM, group_size=4, prompts=48),
    "groups of 16": dataclasses.replace(VLLM, group_size=16, prompts=12),
    "half the prompts": dataclasses.replace(VLLM, prompts=12),
    "twice the prompts": dataclasses.replace(VLLM, prompts=48),
    "long responses": dataclasses.replace(VLLM, lengths=(160, 160)),
    "16 at once": dataclasses.replace(VLLM, in_flight=16),
    "64 at once": dataclasses.replace(VLLM, in_flight=64),
    "synchronous": dataclasses.replace(VLLM, schedule="sync"),
}
TINY = ("fast engines",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", type=Path, metavar="FILE")
    parser.add_argument("--measure", type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the runs that are measured")
    parser.add_argument("--vllm", action="store_true", help="run vLLM's engines")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    bases, trials = {"calibrating": BASE}, {**ENGINES_BOUND, **TRAINER_BOUND, AGAIN: BASE}
    if arguments.vllm:
        bases, trials = VLLM_BASES, {**OF_VLLM, AGAIN: VLLM}
    count, num_simulated = ITERATIONS, SIMULATED
    if arguments.tiny:
        trials = {name: dataclasses.replace(trials[name], speed=FAST, prompts=4) for name in (*TINY, AGAIN)}
        count, num_simulated = 2, 2
    if arguments.only:
        trials = {name: trials[name] for name in (*arguments.only, AGAIN)}
    with tempfile.TemporaryDirectory() as folder:
        world = _World(Path(folder), count, is_forked=arguments.tiny)
        both = arguments.predict is None and arguments.measure is None
        file = arguments.predict or arguments.measure or Path(folder) / "predictions.json"
        if arguments.predict or both:
            _predict(world, bases, trials, num_simulated, file)
        if arguments.measure or both:
            figures = _measure(world, trials, file)
            report.finish(figures | _time_simulator(2 if arguments.tiny else 100))


def _predict(
    world: "_World", bases: Mapping[str, Trial], trials: Mapping[str, Trial], num_simulated: int, file: Path
) -> None:
    """Measure the calibrating runs, and write down their predictions of all others."""
    measured = [world.run(name, trial) for name, trial in bases.items()]
    costs = calibrate(measured)
    print(f"calibrated: {costs}")
    print("calibrating iterations:", ", ".join(f"{one.record.iteration_seconds:.2f} s" for one in measured))
    predictions = {name: predict(trial, costs, num_simulated) for name, trial in trials.items()}
    content = {"costs": dataclasses.asdict(costs), "seconds": predictions}
    file.write_text(json.dumps(content, indent=2) + "\n")
    for name, seconds in predictions.items():
        print(f"{name:<30}{seconds:>8.2f} s predicted")


def predict(trial: Trial, costs: Costs, num_iterations: int = SIMULATED) -> float:
    """Predict an iteration.

    A script changes values that are known before the run: speed, delay and lengths.
    """
    engine = costs.engine
    if isinstance(engine, ScriptedCosts):
        assert trial.speed is not None
        assert BASE.speed is not None
        engine = dataclasses.replace(engine.faster(trial.speed / BASE.speed), max_in_flight=trial.in_flight)
        if trial.delay != BASE.delay:
            engine = dataclasses.replace(engine, delay=trial.delay)
    else:
        engine = dataclasses.replace(engine, max_running=trial.in_flight, max_in_flight=2 * trial.in_flight)
    setting = Setting(
        trial.schedule, trial.prompts, trial.group_size, trial.group_size, Uniform(3, 11), Uniform(*trial.lengths),
        trial.engines, trial.replicas, trial.stages, trainer_devices=trial.stages * trial.replicas,
        engine_devices=trial.engines,
    )  # fmt: skip
    return simulate(setting, dataclasses.replace(costs, engine=engine), num_iterations).seconds


def _measure(world: "_World", trials: Mapping[str, Trial], file: Path) -> dict[str, float]:
    """Run the predicted settings, and compare."""
    predictions = json.loads(file.read_text())["seconds"]
    print(f"\n{'':<28}{'predicted':>10}{'measured':>10}{'error':>8}{'load':>6}  measured iterations, s")
    errors = {}
    for name, trial in trials.items():
        record = world.run(name, trial).record
        predicted, seconds = predictions[name], record.iteration_seconds
        errors[name] = predicted / seconds - 1
        all_of_them = " ".join(f"{one.seconds['iteration']:.2f}" for one in record.iterations)
        load = os.getloadavg()[0]
        print(
            f"{name:<30}{predicted:>8.2f}{seconds:>10.2f}{errors[name]:>+8.1%}{load:>6.1f}  {all_of_them}", flush=True
        )
    drift = abs(errors.pop(AGAIN))
    figures = {"error_of_base": drift}
    # Some runs of both kinds have the same name.
    parts = {"vllm": OF_VLLM} if trials[AGAIN].speed is None else {"engines": ENGINES_BOUND, "trainer": TRAINER_BOUND}
    for part, names in parts.items():
        absolute = [abs(errors[name]) for name in names if name in errors] or [0.0]
        figures |= {f"error_median_{part}": statistics.median(absolute), f"error_worst_{part}": max(absolute)}
    return figures


def _time_simulator(num_iterations: int) -> dict[str, float]:
    """Time `num_iterations` iterations on 4,096 devices."""
    setting, costs = large_run()
    begun, computed = time.monotonic(), time.process_time()
    result = simulate(setting, costs, num_iterations)
    seconds, computed = time.monotonic() - begun, time.process_time() - computed
    print(
        f"\n{setting.num_devices} devices, {num_iterations} iterations: {seconds:.1f} s, {computed:.1f} of CPU time, "
        f"{result.num_events} events"
    )
    return {"seconds_4096": seconds, "cpu_seconds_4096": computed, "events_4096": float(result.num_events)}


def large_run() -> tuple[Setting, Costs]:
    """Return 4,096 devices, half of which train; 32,768 responses an iteration, with a long tail."""
    costs = Costs(
        BatchingCosts(0.015, 5e-5, 4e-9, 1e-5, max_running=128, max_in_flight=256),
        TrainerCosts(per_token=2e-5, per_micro_batch=0.01, update=2.0, exchange=1e-3),
        publish=5.0,
    )
    setting = Setting(
        "periodic", 2048, 16, 16, Uniform(200, 400), Lognormal(3000, 1.0, 32768, 0.3), num_engines=512,
        num_replicas=64, num_stages=4, trainer_devices=2048, engine_devices=2048,
    )  # fmt: skip
    return setting, costs


class _World:
    """A model, prompts and a reward, and runs with them."""

    def __init__(self, folder: Path, num_iterations: int, is_forked: bool) -> None:
        from tests.e2e import loop

        self._count = num_iterations
        # Forked ranks start at once, and share memory with the process that they come from.
        self._is_forked = is_forked
        self._folder = folder
        model = loop.draw_model(folder / "model", **MODEL)
        prompts = loop.write_prompts(folder / "prompts.jsonl", 400)
        self._world = loop.World(folder, model, prompts, loop.write_reward(folder / "reward.py"))

    def run(self, name: str, trial: Trial) -> MeasuredRun:
        from tests.e2e import loop

        name = name.replace(" ", "-").replace(",", "")
        if trial.speed is None:
            of_engine = {
                "rollout_engine": "vllm", "rollout_max_num_seqs": trial.in_flight, "rollout_ignore_eos": True,
                "rollout_max_tokens": trial.lengths[1], "rollout_max_in_flight": 2 * trial.in_flight,
            }  # fmt: skip
        else:
            script = self._folder / f"{name}.json"
            script.write_text(
                json.dumps({"lengths": trial.lengths, "tokens_per_second": trial.speed, "delay": trial.delay})
            )
            of_engine = {
                "rollout_script": script, "rollout_max_in_flight": trial.in_flight,
                "rollout_max_tokens": trial.lengths[1] + 1,
            }  # fmt: skip
        words = self._world.words(
            name, rollout_num_engines=trial.engines, seq_length=SEQ_LENGTH, train_iters=self._count,
            grpo_prompts_per_step=trial.prompts, grpo_group_size=trial.group_size, micro_batch_size=trial.group_size,
            lr=1e-6, progress="none", log_samples=0, schedule=trial.schedule, consume_order="completion",
            pipeline_model_parallel_size=trial.stages, **of_engine,
        )  # fmt: skip
        loop.run(self._folder / f"{name}-output", trial.stages * trial.replicas, words, is_forked=self._is_forked)
        return read_run(self._folder / "runs" / name, {})


if __name__ == "__main__":
    main()
