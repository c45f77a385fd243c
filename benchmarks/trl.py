"""Compare a run of ours with TRL's GRPOTrainer: the same model, prompts, groups, lengths and cores, in turns.

TRL has an environment of its own, on top of this one. The best of several batch sizes, threads and processes for TRL is
found first; nothing is pinned. Ours is `torchrun pretrain_grpo.py` as it is, with one process or with one for each
core, whichever is faster, and beside it one rank and its engine on a core each. `--colocated` compares with our own
synchronous run in which all cores sample and then all train. Seconds are those of whole iterations, each run's first
left out: a run of ours is the beginning of a long one, and its start takes the same as that one's.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks import report
from benchmarks.overlap import WORDS
from benchmarks.pinning import pin
from benchmarks.trl_trainer import Settings
from megatron_rl.observe import metrics
from megatron_rl.observe.timeline import WHOLE
from tests.e2e import loop
from tests.ranks import ROOT

ENVIRONMENT = ROOT / ".venv-trl"
# Iterations of the run whose first are measured.
WHOLE_RUN = 1000
DEFAULT, TRL, PINNED, COLOCATED = "as it is", "TRL", "pinned", "colocated"
# The key of our figure over each rival's.
RIVALS = {TRL: "vs_trl_{}", PINNED: "default_vs_pinned", COLOCATED: "vs_colocated_{}"}
# Pinned cores are tried where a process's own work is the largest part, the colocated run where it is least.
ASKED = {"tiny": (TRL, PINNED), "10m": (TRL,), "40m": (TRL, COLOCATED)}


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its answers."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    """Heads of 32 numbers, with half as many of keys and values."""
    vocab_size: int
    prompt_length: int
    num_tokens: int
    """Tokens of a response."""
    group_size: int
    num_prompts: int
    """Prompts of an iteration."""
    num_iterations: int
    """Iterations of a run of ours; its first does not count."""
    num_steps: int
    """Steps of a run of TRL; its first does not count."""
    num_searched: int
    """Prompts of a step while the best settings for TRL are searched."""


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 2, 64, 192, 4, 512, 512, 64, 8, 16, num_iterations=9, num_steps=5, num_searched=16),
        Size("10m", 8, 256, 1024, 8, 4096, 1024, 64, 16, 8, num_iterations=4, num_steps=2, num_searched=2),
        Size("40m", 8, 512, 2048, 16, 8192, 256, 32, 8, 16, num_iterations=4, num_steps=2, num_searched=4),
    )
}
LEAST = Size("tiny", 2, 64, 192, 4, 512, 16, 4, 4, 2, num_iterations=2, num_steps=2, num_searched=2)


Run = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The settings that TRL runs with."""

    num_processes: int
    num_threads: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.num_processes} x {self.num_threads} threads, {self.batch_size} responses"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--colocated", action="store_true", help="only compare with colocated runs of ours")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    sizes, rounds = [SIZES[name] for name in arguments.sizes], arguments.rounds
    if arguments.tiny:
        sizes, rounds = [LEAST], 1
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            rivals = [COLOCATED] if arguments.colocated else ASKED[size.name]
            # Each is one more start of vLLM.
            rivals = rivals[:1] if arguments.tiny else rivals
            figures |= _compare(World(Path(folder) / size.name, size), rounds, rivals)
    report.finish(figures)


def _compare(world: "World", rounds: int, rivals: Sequence[str]) -> dict[str, float]:
    """Compare ours and these, in turns."""
    size = world.size
    num_ranks = 1 if size is LEAST else _find_ranks(world)
    runs: dict[str, Run] = {DEFAULT: functools.partial(world.run_ours, num_ranks=num_ranks)}
    if TRL in rivals:
        make_environment()
        best = _search(world) if size is not LEAST else Choice(1, 1, size.group_size)
        print(f"{size.name}: TRL is given {best}", flush=True)
        runs[TRL] = functools.partial(world.run_trl, best)
    if PINNED in rivals:
        runs[PINNED] = functools.partial(world.run_ours, is_pinned=True)
    if COLOCATED in rivals:
        runs[COLOCATED] = world.run_colocated
    found = world.take_turns(runs, rounds)
    ratios = {
        name: [ours / theirs for ours, theirs in zip(found[DEFAULT], found[name], strict=True)] for name in rivals
    }
    report.table("in the same round", {f"ours / {name}": values for name, values in ratios.items()}, "")
    return {RIVALS[name].format(size.name): statistics.median(values) for name, values in ratios.items()}


def make_environment() -> None:
    """Install TRL beside this environment."""
    command = ["tools/make_environment", str(ENVIRONMENT), "requirements/trl.lock", "--on", sys.prefix]
    subprocess.run(command, cwd=ROOT, check=True)


def _find_ranks(world: "World") -> int:
    """Return one rank, or one for each core, whichever is faster."""
    counts = dict.fromkeys([1, len(os.sched_getaffinity(0))])
    rates = {count: world.run_ours(num_ranks=count) for count in counts}
    report.table(f"{world.size.name}: ranks", {str(count): [rate] for count, rate in rates.items()}, "samples/s")
    return max(rates, key=lambda count: rates[count])


def _search(world: "World") -> Choice:
    """Return the fastest choice for TRL: one process or one for each core, small to large micro-batches."""
    num_cores = len(os.sched_getaffinity(0))
    size, times = world.size, {}
    arrangements = dict.fromkeys([(1, 1), (1, num_cores), (num_cores, 1)])
    most = size.num_searched * size.group_size
    for (num_processes, num_threads), batch_size in itertools.product(arrangements, (size.group_size, 32, 128)):
        if batch_size == size.group_size or batch_size <= most // num_processes:
            choice = Choice(num_processes, num_threads, batch_size)
            times[choice] = world.run_trl(choice, size.num_searched)
    report.table(f"TRL, {size.name}", {str(choice): [rate] for choice, rate in times.items()}, "samples/s")
    return max(times, key=lambda choice: times[choice])


class World:
    """A model, a reward, and runs over them."""

    def __init__(self, folder: Path, size: Size):
        self.size = size
        self._folder = folder
        self._model = loop.draw_model(
            folder / "model", num_hidden_layers=size.num_layers, hidden_size=size.hidden_size,
            intermediate_size=size.ffn_hidden_size, num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_heads // 2, head_dim=32, vocab_size=size.vocab_size,
            max_position_embeddings=2048,
        )  # fmt: skip
        self._reward = loop.write_reward(folder / "reward.py")
        self._num_runs = 0

    def take_turns(self, runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
        """Return samples a second of each, round by round; the order rotates."""
        found: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(runs[name]())
        report.table(f"{self.size.name}: whole iterations", found, "samples/s")
        return found

    def run_trl(self, choice: Choice, num_prompts: int | None = None) -> float:
        """Return samples a second of TRL."""
        size, folder = self.size, self._next_folder()
        num_prompts = num_prompts or size.num_prompts
        settings = Settings(
            model=str(self._model), prompts=str(self._draw_prompts(folder, num_prompts * size.num_steps)),
            reward=self._reward, num_prompts=num_prompts, group_size=size.group_size, num_tokens=size.num_tokens,
            num_steps=size.num_steps, batch_size=choice.batch_size,
        )  # fmt: skip
        out = folder / "seconds.json"
        program = ["-m", "benchmarks.trl_trainer", json.dumps(dataclasses.asdict(settings)), str(out)]
        command = [
            str(ENVIRONMENT / "bin" / "python"), "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(choice.num_processes), *program,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(choice.num_threads)}
        with _running(command, folder, environment):
            pass
        return num_prompts * size.group_size / statistics.median(json.loads(out.read_text()))

    def run_ours(self, *words: str, is_pinned: bool = False, num_ranks: int = 1) -> float:
        """Return samples a second of ours."""
        size, folder = self.size, self._next_folder()
        prompts = self._draw_prompts(folder, size.num_prompts * size.num_iterations)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks),
            str(ROOT / "pretrain_grpo.py"), "--hf-model", str(self._model), "--prompts", str(prompts),
            "--reward", self._reward, "--rollout-folder", str(folder / "run"), "--platform", "cpu",
            "--seq-length", str(size.prompt_length + size.num_tokens), "--rollout-max-tokens", str(size.num_tokens),
            "--rollout-ignore-eos", "--train-iters", str(WHOLE_RUN), "--exit-interval", str(size.num_iterations),
            "--lr", "1e-6", "--lr-decay-style", "constant", "--grpo-prompts-per-step", str(size.num_prompts),
            "--grpo-group-size", str(size.group_size), "--micro-batch-size", str(size.group_size), *words,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with _running(command, folder, environment) as process:
            if is_pinned:
                _pin(process, folder / "run" / metrics.FILE_NAME)
        seconds = [record[metrics.TIME][WHOLE] for record in metrics.read_metrics(folder / "run")]
        return size.num_prompts * size.group_size / statistics.median(seconds[1:])

    def run_colocated(self) -> float:
        """Return samples a second where an engine and a rank for each core take turns."""
        num_cores = len(os.sched_getaffinity(0))
        words = ("--schedule", "sync", "--rollout-num-engines", str(num_cores), "--rollout-num-threads", "1")
        return self.run_ours(*words, num_ranks=num_cores)

    def _next_folder(self) -> Path:
        self._num_runs += 1
        folder = self._folder / f"run-{self._num_runs}"
        folder.mkdir()
        return folder

    def _draw_prompts(self, folder: Path, count: int) -> Path:
        draw, path = random.Random(self._num_runs), folder / "prompts.jsonl"
        texts = (" ".join(draw.choices(WORDS, k=self.size.prompt_length)) for _ in range(count))
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        return path


@contextmanager
def _running(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """Start the process, which must end well."""
    path = folder / "output"
    with path.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
        if code := process.wait():
            raise RuntimeError(f"exit code {code}:\n{path.read_text()[-4000:]}")
    finally:
        process.terminate()
        process.wait()


def _pin(process: subprocess.Popen, first_line: Path) -> None:
    """Wait for the first iteration, then pin the sidecar with its engine to one core, the rank to another."""
    while process.poll() is None and not (first_line.exists() and first_line.read_text()):
        time.sleep(0.1)
    if process.poll() is not None:
        return
    cores = sorted(os.sched_getaffinity(0))
    started = psutil.Process(process.pid).children(recursive=True)
    sidecar = next(one for one in started if "megatron_rl.sidecar" in one.cmdline())
    of_sidecar = [sidecar, *sidecar.children(recursive=True)]
    for one in started:
        pin(one, {cores[0] if one in of_sidecar else cores[-1]})


if __name__ == "__main__":
    main()
