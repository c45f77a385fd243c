"""Iterations of a run at one of three loads, periodic and synchronous in turns, and what the run says as it starts.

A load is generation over training. It follows from the length of prompts: each is computed once a group by the trainer,
which differentiates it, and once by the engine, which does not. Some tokens end a response, so that lengths differ.
"""

import dataclasses
import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.work import Work
from benchmarks.overlap import Iteration
from megatron_rl.observe.metrics import read_metrics
from tests.ranks import ROOT

REWARD = '''
def parity(completion_ids, **columns):
    """Return a reward that is as good as random, and the same for the same tokens."""
    return [float(sum(ids) % 2) for ids in completion_ids]
'''
_LINE = re.compile(r"^start +(?P<seconds>[\d.]+) s  (?P<text>.*)$", re.MULTILINE)
# Seconds in which a run that is over time ends its sidecar.
END_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Load:
    """The groups of an iteration."""

    name: str
    prompt: int
    """Tokens of a prompt."""
    num_prompts: int = 80
    group_size: int = 8
    most_tokens: int = 128
    """The most tokens of a response."""
    num_stop_tokens: int = 600
    """Tokens that end a response: of 151,936, the mean length is 100."""
    groups_at_once: int = 4
    """The groups of a micro-batch."""
    num_rounds: int = 2

    def __str__(self) -> str:
        return f"{self.name}, {self.num_prompts} x {self.group_size}, {self.prompt}"


BALANCED = Load("balanced", 832)
OTHERS = (Load("generation longer", 64), Load("training longer", 2560))
TINY = Load("tiny", 12, num_prompts=4, group_size=2, most_tokens=8, num_stop_tokens=16, groups_at_once=1, num_rounds=1)


@dataclasses.dataclass(frozen=True)
class Said:
    """One line that a run says as it starts."""

    seconds: float
    text: str


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of a run; its first iteration of each schedule warms up, and is left out."""

    iterations: Sequence[Iteration]
    start: float
    """Seconds from the start of the process to its first iteration."""


def run_trainer(work: Work, load: Load, folder: Path, words: Sequence[str], is_own: bool) -> Run:
    """Run a trainer in the run's folder; `is_own` if it starts its own sidecar, by the words.

    Raise TimeoutError if the time does not suffice.
    """
    vocab_size = work.architecture.vocab_size
    count = 2 * (1 + load.num_rounds)
    output = find_output(folder, load)
    out, prompts = output.with_suffix(".json"), output.with_suffix(".jsonl")
    write_prompts(prompts, load.prompt, load.num_prompts * count, vocab_size)
    stop_tokens = range(2, 2 + load.num_stop_tokens)
    command = [
        sys.executable, "-m", "benchmarks.overlap_trainer", str(out), "both", "--platform", work.device,
        *(["--bf16"] if work.architecture.dtype == "bfloat16" else []),
        "--hf-model", str(work.make_model()), "--prompts", str(prompts), "--rollout-folder", str(folder),
        "--seq-length", str(load.prompt + load.most_tokens), "--rollout-max-tokens", str(load.most_tokens),
        "--rollout-stop-tokens", *map(str, stop_tokens), "--train-iters", str(count),
        "--grpo-prompts-per-step", str(load.num_prompts), "--grpo-group-size", str(load.group_size),
        "--micro-batch-size", str(load.groups_at_once * load.group_size), "--lr", "1e-6", "--progress", "lines",
        "--log-samples", "0", "--rollout-mismatch-warning", "1", *words,
    ]  # fmt: skip
    _call(command, output, work.seconds_left)
    start = read_metrics(folder)[-count]["time"]["start"] if is_own else 0.0
    return Run([Iteration(**values) for values in json.loads(out.read_text())][2:], start)


def find_output(folder: Path, load: Load) -> Path:
    """Return the file of the output of a run in that folder at that load."""
    return folder.with_name(f"{folder.name}-{load.name.replace(' ', '-')}.output")


def find_said(output: str, folder: Path) -> list[Said]:
    """Return the lines of a start, without the path of the run's folder."""
    return [
        Said(float(match["seconds"]), match["text"].replace(str(folder), "RUN")) for match in _LINE.finditer(output)
    ]


def add_row(work: Work, load: Load, run: Run) -> None:
    """Add the row of a load: medians of turns, times for the same number of tokens."""
    sync = [iteration for iteration in run.iterations if iteration.is_sync]
    periodic = [iteration for iteration in run.iterations if not iteration.is_sync]
    ratios = [p.per_token("whole") / s.per_token("whole") for s, p in zip(sync, periodic, strict=True)]
    ratio = statistics.median(ratios)
    seconds = statistics.median(iteration.whole for iteration in sync)
    work.add(
        "schedules", str(load),
        balance=statistics.median(iteration.generate / iteration.train for iteration in sync),
        sync=seconds,
        periodic=seconds * ratio,
        ratio=ratio,
        over_ideal=ratio / statistics.median(iteration.ideal for iteration in sync),
    )  # fmt: skip


def _call(command: Sequence[str], output: Path, seconds: float) -> None:
    """Run a trainer, and end it if it takes longer; its own sidecar ends with it."""
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=_environment())
        try:
            code = process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"a run took longer than {seconds:.0f} s") from None
        finally:
            _end(process)
    if code:
        raise RuntimeError(f"a run ended with {code}:\n{output.read_text()[-3000:]}")


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def write_prompts(path: Path, length: int, count: int, vocab_size: int) -> None:
    """Write `count` prompts of `length` random tokens."""
    draw = random.Random(length)
    with path.open("w") as file:
        for _ in range(count):
            words = (f"w{draw.randrange(2, vocab_size)}" for _ in range(length))
            file.write(json.dumps({"prompt": " ".join(words)}) + "\n")
