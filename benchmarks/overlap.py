"""What overlapping generation with training is worth: the same iterations, periodic and synchronous, in turns.

One vLLM engine has one core, one trainer rank the other. Each row of the table is an iteration, publish included. The
loads are balanced by the length of prompts, which training pays for and generation hardly does; "half" and "double"
are generation's load over training's. gen and train are what a synchronous iteration spends on each.
"""

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import report
from tests.ranks import ROOT
from tests.sidecar.sidecar_process import sidecar

NUM_PROMPTS, GROUP_SIZE = 32, 8
# Ten waves of groups and more: what is in flight at a time is a small part of an iteration.
MAX_IN_FLIGHT = 24
MOST_TOKENS = 128
VOCAB_SIZE = 512
# So many tokens end a response that its length is spread around 43 tokens.
STOP_TOKENS = range(2, 14)
SEQ_LENGTH = 2048
MICRO_BATCHES = (1, 2)
# What generation takes over what training does.
LOADS = {"balanced": 1.0, "gen_half": 0.5, "gen_double": 2.0}
TRAINER_CORE, ENGINE_CORE = 1, 0


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration."""

    is_sync: bool
    whole: float
    publish: float
    generate: float
    """From submission to the last group."""
    train: float
    """Computing: forward, backward and the optimizer's steps, waits left out."""
    tokens: int

    @property
    def overhead(self) -> float:
        """The share of a synchronous iteration that is none of the three."""
        return 1 - (self.publish + self.generate + self.train) / self.whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        world = _World(Path(folder))
        with world.sidecar():
            costs = _measure_costs(world)
            for name in arguments.loads:
                figures |= _compare(world, costs, name, LOADS[name], arguments.rounds)
    report.finish(figures)


def _compare(world: "_World", costs: "_Costs", name: str, load: float, rounds: int) -> dict[str, float]:
    """One load: rounds of both schedules in turns, each with its own best micro-batch."""
    length = costs.prompt_length(load)
    by_groups = {groups: world.iterations(length, groups, groups, 2) for groups in MICRO_BATCHES}
    best = {}
    for is_sync, title in ((True, "synchronous"), (False, "periodic")):
        seconds = {
            groups: min(i.whole for i in iterations if i.is_sync == is_sync) for groups, iterations in by_groups.items()
        }
        best[is_sync] = min(MICRO_BATCHES, key=lambda groups, seconds=seconds: seconds[groups])
        listed = ", ".join(f"{groups}: {seconds[groups]:.2f} s" for groups in MICRO_BATCHES)
        print(f"{title}, by groups of a micro-batch: {listed}; the best is {best[is_sync]}")
    iterations = world.iterations(length, best[True], best[False], 1 + rounds)
    sync = [iteration for iteration in iterations if iteration.is_sync]
    periodic = [iteration for iteration in iterations if not iteration.is_sync]
    generate, train = (statistics.median(getattr(i, part) for i in sync) for part in ("generate", "train"))
    print(f"\n{name}: prompts of {length} tokens, generation / training = {generate / train:.2f}, wanted {load}")
    report.table(
        "seconds",
        {
            "synchronous": [i.whole for i in sync],
            "periodic": [i.whole for i in periodic],
            "publish": [i.publish for i in iterations],
            "generation alone (sync)": [i.generate for i in sync],
            "generation inside (periodic)": [i.generate for i in periodic],
            "training alone (sync)": [i.train for i in sync],
            "training inside (periodic)": [i.train for i in periodic],
        },
        "s",
    )
    ratios = [p.whole / s.whole for p, s in zip(periodic, sync, strict=True)]
    efficiencies = [max(s.generate, s.train) / p.whole for p, s in zip(periodic, sync, strict=True)]
    kept = [(p.tokens / p.generate) / (s.tokens / s.generate) for p, s in zip(periodic, sync, strict=True)]
    trained = [(p.tokens / p.train) / (s.tokens / s.train) for p, s in zip(periodic, sync, strict=True)]
    overheads = [i.overhead for i in sync]
    report.table(
        "ratios",
        {
            "periodic / synchronous": ratios,
            "efficiency": efficiencies,
            "generation's speed kept": kept,
            "training's speed kept": trained,
            "overhead of a sync iteration": overheads,
        },
        "",
    )
    short = {"balanced": "ratio_balanced", "gen_half": "ratio_gen_half", "gen_double": "ratio_gen_double"}[name]
    found = {short: statistics.median(ratios)}
    if name == "balanced":
        found |= {
            "efficiency_balanced": statistics.median(efficiencies),
            "gen_kept": statistics.median(kept),
            "loop_overhead": statistics.median(overheads),
            "load_balanced": generate / train,
        }
    return found


@dataclasses.dataclass(frozen=True)
class _Costs:
    """What the two loads cost, so that they can be balanced."""

    generate: float
    short: tuple[int, float]
    long: tuple[int, float]

    def prompt_length(self, load: float) -> int:
        """The prompts with which generation takes `load` times what training does."""
        (short, quick), (long, slow) = self.short, self.long
        wanted = self.generate / load
        length = short + (wanted - quick) * (long - short) / (slow - quick)
        return max(8, min(SEQ_LENGTH - MOST_TOKENS - 1, round(length)))


def _measure_costs(world: "_World") -> _Costs:
    """Synchronous iterations with short and with long prompts."""
    short, long = 8, 128
    quick, slow = (_of_sync(world.iterations(length, 1, 1, 2)) for length in (short, long))
    return _Costs(statistics.median([slow.generate, quick.generate]), (short, quick.train), (long, slow.train))


def _of_sync(iterations: Sequence[Iteration]) -> Iteration:
    return next(i for i in reversed(iterations) if i.is_sync)


class _World:
    """A model, a sidecar, and runs of a trainer against it."""

    def __init__(self, folder: Path):
        from tests.e2e import loop

        self._folder = folder
        self._run = folder / f"overlap-{os.getpid()}"
        self._model = loop.draw_model(
            folder / "model", vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, head_dim=32,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ_LENGTH,
        )  # fmt: skip
        self._reward = loop.write_reward(folder / "reward.py")
        self._num_runs = 0

    @contextmanager
    def sidecar(self) -> Iterator[None]:
        words = (
            "--hf-model", str(self._model), "--seq-length", str(SEQ_LENGTH), "--reward", self._reward,
            "--reward-workers", "1", "--platform", "cpu", "--rollout-max-num-seqs", str(MAX_IN_FLIGHT),
            "--rollout-max-in-flight", str(MAX_IN_FLIGHT),
        )  # fmt: skip
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {ENGINE_CORE})
        try:
            with sidecar(self._run, *words, seconds=180):
                yield
        finally:
            os.sched_setaffinity(0, everywhere)

    def iterations(self, prompt_length: int, sync_groups: int, periodic_groups: int, rounds: int) -> list[Iteration]:
        """So many of both schedules in turns; the first of each warms up, and does not count."""
        self._num_runs += 1
        prompts = self._folder / f"prompts-{self._num_runs}.jsonl"
        draw = random.Random(self._num_runs)
        with prompts.open("w") as file:
            for _ in range(NUM_PROMPTS * 2 * rounds):
                words = [str(draw.randrange(20, VOCAB_SIZE)) for _ in range(prompt_length)]
                file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
        out = self._folder / f"out-{self._num_runs}.json"
        words = [
            "--hf-model", str(self._model), "--prompts", str(prompts), "--seq-length", str(SEQ_LENGTH),
            "--rollout-endpoint", (self._run / "address").read_text().strip(), "--rollout-folder", str(self._run),
            "--rollout-max-tokens", str(MOST_TOKENS), "--rollout-stop-tokens", *map(str, STOP_TOKENS),
            "--train-iters", str(2 * rounds), "--grpo-prompts-per-step", str(NUM_PROMPTS),
            "--grpo-group-size", str(GROUP_SIZE), "--micro-batch-size", str(sync_groups * GROUP_SIZE),
            "--lr", "1e-6", "--lr-decay-style", "constant", "--progress", "none", "--seed", str(self._num_runs),
            "--log-samples", "0", "--rollout-mismatch-warning", "1",
        ]  # fmt: skip
        subprocess.run(
            [
                "taskset", "-c", str(TRAINER_CORE), sys.executable, "-m", "benchmarks.overlap_trainer",
                str(out), str(periodic_groups * GROUP_SIZE), *words,
            ],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return [Iteration(**values) for values in json.loads(out.read_text())][2:]


if __name__ == "__main__":
    from benchmarks.overlap import main as importable_main

    importable_main()
