"""Measure the cost of a trace, and check the ledger: iterations with and without a trace in turns, in one run.

One trainer rank has one core; the sidecar, whose engines are scripted, has the other. Of every second iteration neither
records anything. The rank's time in recording is counted besides. Meanwhile the kernel is asked, a hundred times a
second, whether the rank's main thread runs or sleeps: it sleeps while the rank waits for a slot, and runs while it
computes. In a second run the same is asked of a vLLM engine, which sleeps while it has nothing to sample.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks import report
from tests.ranks import ROOT
from tests.sidecar.sidecar_process import sidecar

GROUP_SIZE, NUM_PROMPTS, PROMPT_LENGTH, MOST_TOKENS = 8, 12, 144, 96
VOCAB_SIZE, SEQ_LENGTH = 512, 512
TRAINER_CORE, SIDECAR_CORE = 1, 0
# Groups come a little slower than they are trained: the rank waits for some.
TOKENS_PER_SECOND = 4500
SAMPLE_SECONDS = 0.01
ENGINE_ITERATIONS = 12
# The state of a process, by the cause that the ledger has.
KINDS = {"busy": "computing", "optimizer": "computing", "first": "waiting", "starved": "waiting", "tail": "waiting"}
# The tail of the only engine is the work that it samples once no group waits for it.
KINDS_OF_ENGINE = {"busy": "computing", "tail": "computing", "idle": "waiting"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24, help="iterations of each kind")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    rounds, num_prompts = (2, 2) if arguments.tiny else (arguments.rounds, NUM_PROMPTS)
    with tempfile.TemporaryDirectory() as folder:
        iterations, samples, run = _measure(Path(folder), rounds, num_prompts)
        figures = _compare(iterations) | _check(run, samples)
        if not arguments.tiny:
            figures |= _check_engine(Path(folder) / "engine")
    report.finish(figures)


def _compare(iterations: list[dict[str, float]]) -> dict[str, float]:
    """Compare an iteration with a trace and the next one, without: times per token, since each draws its own.

    How long groups let the rank wait differs by more than a trace costs, so waits are left out.
    """
    pairs = list(zip(iterations[0::2], iterations[1::2], strict=False))
    rows = {"wall": "wall", "wall without waits": "working", "the rank's CPU time": "cpu"}
    for row, part in rows.items():
        report.table(
            f"an iteration: {row}, of a thousand tokens",
            {
                "with a trace": [1e6 * on[part] / on["tokens"] for on, _ in pairs],
                "without": [1e6 * off[part] / off["tokens"] for _, off in pairs],
            },
            "ms",
        )
    ratios = {
        row: [on[part] / on["tokens"] * off["tokens"] / off[part] for on, off in pairs] for row, part in rows.items()
    }
    report.table("with / without", ratios, "")
    for row, values in ratios.items():
        print(f"{row}: median {statistics.median(values):.4f}, its standard error {_find_error(values):.4f}")
    shares = [on["recording"] / on["wall"] for on, _ in pairs]
    report.table("in recording itself", {"share of an iteration": shares}, "")
    working = ratios["wall without waits"]
    return {
        # Below 0 it is lost in the difference of two iterations.
        "trace_overhead": max(0.0, statistics.median(working) - 1),
        "trace_share": statistics.median(shares),
    }


def _find_error(values: list[float]) -> float:
    """Return the standard error of a median, from the median deviation: other programs make a few iterations long."""
    middle = statistics.median(values)
    deviation = 1.48 * statistics.median(abs(value - middle) for value in values)
    return float(1.25 * deviation / len(values) ** 0.5)


def _check(run: Path, samples: list[tuple[float, str]]) -> dict[str, float]:
    """Return, for iterations with a trace, the share of the time that has a cause, and the agreement of the samples."""
    from megatron_rl.analysis.ledger import compute_ledger, divide_rank
    from megatron_rl.observe.trace import read_trace

    trace = read_trace(run)
    trace = trace.select(version for version in trace.versions if version % 2 == 0 and version >= 2)
    accounts = compute_ledger(trace)
    for account in accounts:
        shares = ", ".join(f"{cause} {account.share(cause):.1%}" for cause in account.seconds)
        print(f"{account.name}: {account.wall:.2f} s, {shares}")
    seconds, sampled = _count_asleep(divide_rank(trace, trace.ranks[0]), samples, _find_offset(run), KINDS)
    return {
        "ledger_coverage": min(1 - account.share("other") for account in accounts),
        "ledger_vs_sampler": _compare_with_samples(seconds, sampled),
    }


def _check_engine(folder: Path) -> dict[str, float]:
    """Run with an engine of vLLM's, and compare its ledger with samples of its state.

    While its main thread waits for another one of the process, the engine works, so all of its threads are asked too.
    """
    from megatron_rl.analysis.ledger import compute_ledger, divide_engine
    from megatron_rl.observe.trace import read_trace
    from tests.e2e import loop

    model = loop.draw_model(folder / "model", vocab_size=VOCAB_SIZE, max_position_embeddings=SEQ_LENGTH)
    prompts, reward = loop.write_prompts(folder / "prompts.jsonl", 400), loop.write_reward(folder / "reward.py")
    words = loop.World(folder, model, prompts, reward).words(
        "run", rollout_engine="vllm", rollout_num_engines=1, rollout_ignore_eos=True, rollout_max_tokens=MOST_TOKENS,
        seq_length=SEQ_LENGTH, train_iters=ENGINE_ITERATIONS, grpo_prompts_per_step=NUM_PROMPTS,
        grpo_group_size=GROUP_SIZE, micro_batch_size=GROUP_SIZE, lr=1e-6, progress="none", log_samples=0,
        consume_order="completion",
    )  # fmt: skip
    with loop.running(folder / "output", 1, words, is_forked=False) as ranks:
        engine = _find_engine(ranks.processes[0].pid)
        with _sampling(engine) as of_main, _sampling(engine, "*") as of_all:
            codes = ranks.wait()
    if any(codes):
        raise SystemExit(f"exit codes {codes}\n{ranks.text()}")
    run = folder / "runs" / "run"
    trace = read_trace(run)
    trace = trace.select(version for version in trace.versions if version >= 2)
    (account,) = (account for account in compute_ledger(trace) if not account.is_rank)
    figures, offset = {}, _find_offset(run, "sidecar")
    for key, samples in (("engine_vs_main_thread", of_main), ("engine_vs_sampler", of_all)):
        print(key)
        found = _count_asleep(divide_engine(trace, account.name), samples, offset, KINDS_OF_ENGINE)
        figures[key] = _compare_with_samples(*found)
    return figures


def _find_engine(pid: int, seconds: float = 300) -> int:
    """Wait for the process of a run in which vLLM computes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("VLLM::Eng"):
                    return process.pid
        time.sleep(0.1)
    raise SystemExit(f"no engine after {seconds:g} s")


def _count_asleep(
    pieces: Iterable[tuple[float, float, str]],
    samples: Sequence[tuple[float, str]],
    offset: float,
    kinds: Mapping[str, str],
) -> tuple[dict[str, float], dict[str, list[bool]]]:
    """Return the ledger's seconds by kind of cause, and the samples: True if the process was asleep."""
    seconds: defaultdict[str, float] = defaultdict(float)
    sampled: dict[str, list[bool]] = {}
    moments = iter([(moment + offset, state) for moment, state in samples])
    sample = next(moments, None)
    for begin, end, cause in pieces:
        kind = kinds.get(cause, "neither")
        seconds[kind] += end - begin
        while sample is not None and sample[0] < end:
            if sample[0] >= begin:
                sampled.setdefault(kind, []).append(sample[1] == "S")
            sample = next(moments, None)
    for kind, sleeping in sampled.items():
        print(f"{kind} by the ledger: {seconds[kind]:.2f} s; asleep in {statistics.fmean(sleeping):.1%} of samples")
    return seconds, sampled


def _compare_with_samples(seconds: Mapping[str, float], sampled: Mapping[str, list[bool]]) -> float:
    """Return the difference between the shares of waits by the ledger and by samples."""
    of_either = [asleep for kind in ("computing", "waiting") for asleep in sampled.get(kind, [])]
    by_ledger = seconds.get("waiting", 0.0) / max(1e-9, seconds.get("waiting", 0.0) + seconds.get("computing", 0.0))
    by_samples = statistics.fmean(of_either) if of_either else by_ledger
    return abs(by_ledger - by_samples)


def _find_offset(run: Path, process: str = "rank-0") -> float:
    from megatron_rl.observe.trace import find_path
    from megatron_rl.shared.records.append_file import read_lines

    return float(read_lines(find_path(run, process))[0]["offset"])


Measured = tuple[list[dict[str, float]], list[tuple[float, str]], Path]


def _measure(folder: Path, rounds: int, num_prompts: int) -> Measured:
    """Return seconds of each iteration, samples of the rank's state, and the run's folder."""
    from tests.e2e import loop

    run = folder / f"trace-{os.getpid()}"
    model = loop.draw_model(
        folder / "model", vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=768, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQ_LENGTH,
    )  # fmt: skip
    reward = loop.write_reward(folder / "reward.py")
    script = folder / "script.json"
    script.write_text(json.dumps({"tokens_per_second": TOKENS_PER_SECOND, "lengths": [32, MOST_TOKENS]}))
    flags = (
        "--hf-model", str(model), "--seq-length", str(SEQ_LENGTH), "--reward", reward, "--reward-workers", "1",
        "--platform", "cpu", "--rollout-engine", "scripted", "--rollout-script", str(script),
        "--rollout-max-num-seqs", "64",
    )  # fmt: skip
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {SIDECAR_CORE})
    with sidecar(run, *flags, module="benchmarks.trace_sidecar"):
        os.sched_setaffinity(0, everywhere)
        return _train(folder, run, model, 2 + 2 * rounds, num_prompts)


def _train(folder: Path, run: Path, model: Path, count: int, num_prompts: int) -> Measured:
    draw, out = random.Random(0), folder / "out.json"
    words = [str(number) for number in range(20, VOCAB_SIZE) if not {"0", "1"} & set(str(number))]
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for _ in range(num_prompts * count):
            file.write(json.dumps({"prompt": " ".join(draw.choices(words, k=PROMPT_LENGTH))}) + "\n")
    command = (
        "taskset", "-c", str(TRAINER_CORE), sys.executable, "-m", "benchmarks.trace_trainer", str(out),
        "--hf-model", str(model), "--prompts", str(prompts), "--seq-length", str(SEQ_LENGTH),
        "--rollout-endpoint", (run / "address").read_text().strip(), "--rollout-folder", str(run),
        "--rollout-max-tokens", str(MOST_TOKENS), "--train-iters", str(count),
        "--grpo-prompts-per-step", str(num_prompts), "--grpo-group-size", str(GROUP_SIZE),
        "--micro-batch-size", str(GROUP_SIZE), "--lr", "1e-6", "--lr-decay-style", "constant",
        "--progress", "none", "--log-samples", "0", "--platform", "cpu", "--rollout-mismatch-warning", "100",
    )  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process,
        _sampling(process.pid) as samples,
    ):
        process.wait()
    if process.returncode:
        raise SystemExit(f"the trainer ended with exit code {process.returncode}")
    # The first two warm up.
    return json.loads(out.read_text())[2:], samples, run


@contextlib.contextmanager
def _sampling(pid: int, threads: str | None = None) -> Iterator[list[tuple[float, str]]]:
    """Ask for the state of a process's main thread, or of those threads, with the time of each answer.

    Threads run if any of them does.
    """
    samples: list[tuple[float, str]] = []
    over = threading.Event()
    tasks = Path(f"/proc/{pid}/task")

    def sample() -> None:
        while not over.wait(SAMPLE_SECONDS):
            try:
                paths = [*tasks.glob(threads or str(pid))]
                states = {(path / "stat").read_text().rpartition(")")[2].split()[0] for path in paths}
            except OSError:
                if tasks.exists():
                    continue
                return
            samples.append((time.monotonic(), "S" if states == {"S"} else "R"))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    from benchmarks.trace import main as importable_main

    importable_main()
