"""Measure the gain from overlapping generation with training: the same iterations, periodic and synchronous, in turns.

One vLLM engine has one core, one trainer rank the other, and the model fits their cache. Times are per token of the
responses, since every iteration draws its own. A load is the time of generation over the time of training. Half a load
comes from more training for a token (longer prompts, a reference model, recomputed layers). A double one comes from an
engine that samples fewer responses at a time. gen and train are the seconds that a synchronous iteration spends on
each.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import report
from tests.ranks import ROOT
from tests.sidecar.sidecar_process import sidecar

GROUP_SIZE, MOST_TOKENS = 8, 128
VOCAB_SIZE = 512
# This many tokens end a response, so that its length is spread around 43 tokens.
STOP_TOKENS = range(2, 14)
# Prompts are numbers that hold no other token's: the tokenizer finds 0 and 1, which end and pad, in any number.
WORDS = [str(number) for number in range(20, VOCAB_SIZE) if not {"0", "1"} & set(str(number))]
SEQ_LENGTH = 2048
TRAINER_CORE, ENGINE_CORE = 1, 0
OVER_IDEAL = "ratio_over_ideal_worst"

MORE_TRAINING = (
    "--grpo-kl-beta", "0.01",
    "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Load:
    """The time of generation over that of training, and the settings that give it."""

    name: str
    wanted: float
    in_flight: int
    """Responses that the engine samples at a time."""
    prompt_length: int
    """Tokens on average; any from half to one and a half times as many."""
    training: tuple[str, ...] = ()
    waves: int = 10
    """The number of times that an iteration's groups fill the engine.

    The time that overlaps with nothing is a small part of it.
    """
    groups: int = 1
    """Groups of a micro-batch."""

    @property
    def num_prompts(self) -> int:
        return self.waves * self.in_flight // GROUP_SIZE


BALANCED = Load("balanced", 1.0, 192, 288, waves=12, groups=2)
# The settings that --search tries for synchronous iterations; the balanced load's own are the first. A setting counts
# as better only by more than two runs of the same differ by.
IN_FLIGHT_TRIED, GROUPS_TRIED = (BALANCED.in_flight, 2 * BALANCED.in_flight), (BALANCED.groups, 1)
LOADS = {
    load.name: load
    for load in (BALANCED, Load("gen_half", 0.5, 96, 560, MORE_TRAINING), Load("gen_double", 2.0, 24, 56, waves=15))
}
TINY = dataclasses.replace(BALANCED, in_flight=GROUP_SIZE, prompt_length=24, waves=2, groups=1)


@dataclasses.dataclass(frozen=True)
class Iteration:
    """Seconds of one iteration."""

    is_sync: bool
    whole: float
    publish: float
    first: float
    """Seconds from submission to the first group."""
    generate: float
    """Seconds from there to the last group."""
    tail: float
    """Seconds from there until the trainer has done with it."""
    train: float
    """Seconds of computing: forward, backward and the optimizer's steps, waits left out."""
    tokens: int

    def per_token(self, part: str) -> float:
        return getattr(self, part) / self.tokens

    @property
    def ideal(self) -> float:
        """The longer of generation and training over both."""
        return max(self.generate, self.train) / (self.generate + self.train)

    @property
    def overhead(self) -> float:
        """The share of a synchronous iteration that is none of the three."""
        return 1 - (self.publish + self.generate + self.train) / self.whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--search", action="store_true", help="only search the best settings for synchronous runs")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    loads, rounds = [LOADS[name] for name in arguments.loads], arguments.rounds
    if arguments.tiny:
        loads, rounds = [TINY], 1
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.search:
            figures = _search(Path(folder), arguments.rounds)
        else:
            for load in loads:
                with _World(Path(folder), load).serving() as world:
                    found = _compare(world, load, rounds)
                    figures |= found | {OVER_IDEAL: max(found[OVER_IDEAL], figures.get(OVER_IDEAL, 0.0))}
    report.finish(figures)


def _search(folder: Path, rounds: int) -> dict[str, float]:
    """Return the speed-up of synchronous iterations of the balanced load with the best settings for them."""
    times: dict[str, list[float]] = {}
    with ExitStack() as stack:
        worlds = {}
        for in_flight in IN_FLIGHT_TRIED:
            load = dataclasses.replace(BALANCED, name=f"sync-{in_flight}", in_flight=in_flight)
            world = _World(folder, load, num_prompts=BALANCED.num_prompts // 3)
            worlds[in_flight] = stack.enter_context(world.serving())
        for _ in range(rounds):
            for (in_flight, world), groups in itertools.product(worlds.items(), GROUPS_TRIED):
                (iteration,) = world.iterations(1, only="sync", groups=groups)
                times.setdefault(f"{in_flight} in flight, {groups} groups a micro-batch", []).append(
                    1e3 * iteration.per_token("whole")
                )
    report.table("synchronous: milliseconds a token of the responses", times, "ms")
    medians = [statistics.median(values) for values in times.values()]
    return {"sync_gain_of_best": medians[0] / min(medians)}


def _compare(world: "_World", load: Load, rounds: int) -> dict[str, float]:
    """Compare rounds of both schedules in turns."""
    iterations = world.iterations(rounds)
    sync = [iteration for iteration in iterations if iteration.is_sync]
    periodic = [iteration for iteration in iterations if not iteration.is_sync]
    balance = [i.generate / i.train for i in sync]
    print(
        f"\n{load.name}: {load.num_prompts} prompts of {load.prompt_length} tokens or so, {GROUP_SIZE} responses each"
    )
    print(f"generation / training wanted {load.wanted}, found {statistics.median(balance):.2f}")
    rows = {"whole": "whole", "generation": "generate", "training": "train"}
    report.table(
        "milliseconds a token of the responses",
        {
            f"{row}, {name}": [1e3 * i.per_token(part) for i in which]
            for row, part in rows.items()
            for name, which in (("synchronous", sync), ("periodic", periodic))
        },
        "ms",
    )
    report.table("seconds", {"iteration": [i.whole for i in sync], "publish": [i.publish for i in iterations]}, "s")
    alone = {
        "publish": [i.publish / i.whole for i in periodic],
        "until the first group": [i.first / i.whole for i in periodic],
        "after the last group": [i.tail / i.whole for i in periodic],
    }
    report.table("of a periodic iteration, where only one of both works", alone, "")
    turns = list(zip(sync, periodic, strict=True))
    ratios = {
        "periodic / synchronous": [p.per_token("whole") / s.per_token("whole") for s, p in turns],
        "efficiency": [max(s.per_token("generate"), s.per_token("train")) / p.per_token("whole") for s, p in turns],
        "generation's speed kept": [s.per_token("generate") / p.per_token("generate") for s, p in turns],
        "training's speed kept": [s.per_token("train") / p.per_token("train") for s, p in turns],
        "overhead of a sync iteration": [i.overhead for i in sync],
        "over ideal": [p.per_token("whole") / s.per_token("whole") / s.ideal for s, p in turns],
    }
    report.table("ratios", ratios, "")
    ratio, efficiency, kept, _, overhead, over_ideal = (statistics.median(values) for values in ratios.values())
    found = {f"ratio_{load.name}": ratio, OVER_IDEAL: over_ideal}
    if load.name == BALANCED.name:
        found |= {
            "efficiency_balanced": efficiency,
            "gen_kept": kept,
            "loop_overhead": overhead,
            "load_balanced": statistics.median(balance),
        }
    return found


def draw_model(folder: Path) -> Path:
    """Draw a model of two layers and 256 hidden units."""
    from tests.e2e import loop

    return loop.draw_model(
        folder, vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=768, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ_LENGTH,
    )  # fmt: skip


class _World:
    """A model, a sidecar, and runs of a trainer against it."""

    def __init__(self, folder: Path, load: Load, num_prompts: int = 0):
        from tests.e2e import loop

        self._load = load
        self._num_prompts = num_prompts or load.num_prompts
        self._folder = folder / load.name
        self._folder.mkdir()
        self._run = self._folder / f"overlap-{os.getpid()}"
        self._model = draw_model(self._folder / "model")
        self._reward = loop.write_reward(self._folder / "reward.py")
        self._num_runs = 0

    @contextmanager
    def serving(self) -> Iterator["_World"]:
        words = (
            "--hf-model", str(self._model), "--seq-length", str(SEQ_LENGTH), "--reward", self._reward,
            "--reward-workers", "1", "--platform", "cpu", "--rollout-max-num-seqs", str(self._load.in_flight),
            "--rollout-max-in-flight", str(self._load.in_flight),
        )  # fmt: skip
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {ENGINE_CORE})
        try:
            with sidecar(self._run, *words):
                yield self
        finally:
            os.sched_setaffinity(0, everywhere)

    def iterations(self, rounds: int, only: str = "", groups: int | None = None) -> list[Iteration]:
        """Return `rounds` iterations of both schedules in turns, or of one.

        The first of each warms up, and does not count.
        """
        self._num_runs += 1
        count = (1 + rounds) * (1 if only else 2)
        prompts = self._folder / f"prompts-{self._num_runs}.jsonl"
        draw = random.Random(self._num_runs)
        with prompts.open("w") as file:
            for _ in range(self._num_prompts * count):
                length = draw.randint(self._load.prompt_length // 2, self._load.prompt_length * 3 // 2)
                file.write(json.dumps({"prompt": " ".join(draw.choices(WORDS, k=length))}) + "\n")
        out = self._folder / f"out-{self._num_runs}.json"
        words = [
            "--hf-model", str(self._model), "--prompts", str(prompts), "--seq-length", str(SEQ_LENGTH),
            "--rollout-endpoint", (self._run / "address").read_text().strip(), "--rollout-folder", str(self._run),
            "--rollout-max-tokens", str(MOST_TOKENS), "--rollout-stop-tokens", *map(str, STOP_TOKENS),
            "--train-iters", str(count), "--grpo-prompts-per-step", str(self._num_prompts),
            "--grpo-group-size", str(GROUP_SIZE), "--micro-batch-size", str((groups or self._load.groups) * GROUP_SIZE),
            "--lr", "1e-6", "--lr-decay-style", "constant", "--progress", "none", "--seed", str(self._num_runs),
            "--log-samples", "0", "--rollout-mismatch-warning", "1", *self._load.training,
        ]  # fmt: skip
        subprocess.run(
            [
                "taskset", "-c", str(TRAINER_CORE), sys.executable, "-m", "benchmarks.overlap_trainer",
                str(out), only or "both", *words,
            ],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return [Iteration(**values) for values in json.loads(out.read_text())][1 if only else 2 :]


if __name__ == "__main__":
    from benchmarks.overlap import main as importable_main

    importable_main()
