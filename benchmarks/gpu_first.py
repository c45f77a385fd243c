"""Do what only a GPU can show, most valuable first, in the twelve minutes that one may be lent: `make gpu-first`.

Each part has its own process and time limit. FOLDER/gpu-first.json has the results, and is written aside and renamed
after each part: a run that is cut off leaves the results of the parts before. Without a GPU it ends at the first part
that needs one. It needs no network. Exit code 1 if a part failed, 3 without a GPU.
"""

import argparse
import dataclasses
import functools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_bench, random_models
from benchmarks.gpu import models, parts
from benchmarks.gpu.schedules import write_prompts
from benchmarks.gpu.tables import read_rows
from benchmarks.kernels.registry import NAMES as KERNELS
from megatron_rl.errors import ExitCode
from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.shared.records.audit_check import verify
from tests.ranks import ROOT
from tests.sidecar.sidecar_process import sidecar

MINUTES = 12.0
FOLDER = ROOT / "build" / "gpu-first"
FILE = "gpu-first.json"
NUM_LAST_LINES = 40
BF16_ON_GPU = ("--platform", "cuda", "--bf16", "--rollout-colocate")
EAGER = "--rollout-vllm-args=--enforce-eager"
SMALL_RUN = (
    "--grpo-prompts-per-step", "8", "--grpo-group-size", "4", "--micro-batch-size", "4", "--seq-length", "256",
    "--rollout-max-tokens", "64", "--rollout-max-num-seqs", "32", "--lr", "1e-6",
)  # fmt: skip
LINEAR_RUN = (
    "--platform", "cuda", "--deterministic-mode", "--consume-order", "prompt", "--rollout-engine", "scripted",
    "--train-iters", "2",
)  # fmt: skip
_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")

Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """One part, which its own process does."""

    seconds: float
    """Seconds that it may take; seconds that earlier parts left are added."""
    do: Callable[[Path], Result]
    """A function that does it in a folder; its result is kept."""


class PartError(Exception):
    """A part that found something wrong; its argument is the result."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first", description=__doc__)
    parser.add_argument("names", metavar="PART", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for results and the output of parts")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.names if name not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; the names are {', '.join(PARTS)}")
    folder = parsed.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if parsed.inside:
        return do_part(parsed.names[0], folder)
    return do_all([name for name in PARTS if name in (parsed.names or PARTS)], folder, parsed.minutes)


def do_all(names: Sequence[str], folder: Path, minutes: float) -> int:
    """Do the parts sequentially, and keep the results after each one."""
    scale, end = minutes / MINUTES, time.monotonic() + 60 * minutes
    spare = 0.0
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        seconds = min(scale * PARTS[name].seconds + spare, end - time.monotonic())
        print(f"\n=== {name}, at most {max(0.0, seconds):.0f} s", flush=True)
        begin = time.monotonic()
        results[name] = start_part(name, folder, seconds) if seconds > 0 else {"state": "left out: out of time"}
        results[name]["seconds"] = round(time.monotonic() - begin, 1)
        spare = max(0.0, seconds - results[name]["seconds"])
        write_aside(folder / FILE, results)
        print(json.dumps(results[name], indent=1), flush=True)
        if results[name].get("exit") == ExitCode.ENVIRONMENT and not torch.cuda.is_available():
            print(f"{name} needs a GPU, and torch finds no CUDA device here: see {folder / FILE}", file=sys.stderr)
            return ExitCode.ENVIRONMENT
    print(f"written: {folder / FILE}")
    return int(any(result["state"] != "complete" for result in results.values()))


def write_aside(path: Path, content: object) -> None:
    """Write a file that is whole at any moment."""
    aside = path.with_suffix(".unfinished")
    aside.write_text(json.dumps(content, indent=1) + "\n")
    aside.replace(path)


def start_part(name: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Do a part in its own process, and end all that it has started when its time is over."""
    output, result = folder / f"{name}.output", folder / f"{name}.json"
    result.unlink(missing_ok=True)
    with output.open("w") as file:
        process = subprocess.Popen(
            make_command(name, folder), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
            env=gpu_bench.make_environment(), start_new_session=True,
        )  # fmt: skip
        try:
            code = gpu_bench.await_end(process, seconds)
        finally:
            gpu_bench.end(process)
    # A part that was ended may have kept what it had so far.
    measured = json.loads(result.read_text()) if result.exists() else {}
    state = {None: f"cut short after {seconds:.0f} s", 0: "complete"}.get(code, "failed")
    if code:
        measured |= {"exit": code, "output": output.read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]}
    return {"state": state, **measured}


def make_command(name: str, folder: Path) -> list[str]:
    """Return the command of a part's process."""
    return [sys.executable, "-u", "-m", "benchmarks.gpu_first", name, "--folder", str(folder), "--inside"]


def do_part(name: str, folder: Path) -> int:
    """Do one part in this process, and write its result."""
    # What it has started is ended with it, in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    try:
        write_aside(folder / f"{name}.json", PARTS[name].do(folder))
    except PartError as error:
        write_aside(folder / f"{name}.json", error.args[0])
        return ExitCode.CRASH
    return ExitCode.OK


def call(*words: str | Path) -> str:
    """Run a program of this environment, and return what it prints; end with its exit code if it fails."""
    process = subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines = []
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    finally:
        process.terminate()
        code = process.wait()
    if code:
        sys.exit(code)
    return "".join(lines)


def train(run: Path, *words: str) -> list[dict[str, Any]]:
    """Train on one GPU in a new folder; return the run's metrics."""
    shutil.rmtree(run, ignore_errors=True)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "pretrain_grpo.py")
    call(*launcher, "--rollout-folder", run, "--reward-workers", "1", *words)
    return read_metrics(run)


# The parts.


def find_packages(_: Path) -> Result:
    """Name what is installed: this needs no GPU."""
    return {"packages": gpu_bench.describe_packages(), "python": sys.version.split()[0]}


def check_kernels(_: Path) -> Result:
    """Compare all kernels, and the attention that is chosen by default, with their twins."""
    measured = {}
    for words in (("--kernels", *KERNELS), ("--backend", "triton")):
        measured[words[0]] = call("-m", "benchmarks.gpu_check", *words).splitlines()[-NUM_LAST_LINES:]
    return measured


def run_demo(folder: Path) -> Result:
    """Train the demo's task in bf16 with trainer and engine on one GPU; check its audit log."""
    output = call("-m", "examples.arithmetic.demo", "--gpu", "--out", folder / "demo")
    audit = next(line for line in output.splitlines() if line.startswith("audit: "))
    result = {**json.loads((folder / "demo" / "result.json").read_text()), "audit": audit}
    if " 0 breaches" not in audit:
        raise PartError(result)
    return result


def measure_part(name: str, folder: Path) -> Result:
    """Measure a part of `make gpu-bench`, whose rows are the result."""
    part = parts.PARTS[name]
    rows = gpu_bench.find_rows(folder, name)
    rows.unlink(missing_ok=True)
    where = ("--rows", rows, "--folder", folder / "models")
    try:
        call("-m", "benchmarks.gpu.run_part", name, *where, "--seconds", str(part.seconds))
    finally:
        measured = {"rows": [dataclasses.asdict(row) for row in read_rows(rows)]}
        write_aside(folder / f"{name}.json", measured)
    return measured


def publish_each_way(folder: Path) -> Result:
    """Publish 0.6 B parameters to an engine on the same GPU: by files, and from device to device.

    NCCL has no group of two ranks on one device.
    """
    model, prompts = make_model(folder), folder / "prompts.jsonl"
    write_prompts(prompts, 32, 64, models.SIZES["0.6b"].vocab_size)
    measured: dict[str, Any] = {}
    for through in ("files", "ipc"):
        run = folder / f"publish-{through}"
        words = ("--hf-model", str(model), "--prompts", str(prompts), "--reward", "length:32", *SMALL_RUN)
        metrics = train(run, *BF16_ON_GPU, *words, "--train-iters", "4", EAGER, "--publish-through", through)
        report = verify(run)
        measured[through] = {
            "seconds": [one["time"]["publish"] for one in metrics], "breaches": len(report.breaches),
            "proven": f"{report.proofs.num_whole} of {report.proofs.num_reports}",
        }  # fmt: skip
        write_aside(folder / "publish.json", measured)
    return measured


def take_turns(folder: Path) -> Result:
    """Train 0.6 B parameters with engine and rank on the GPU by turns; each publish is proved after a sleep of vLLM's.

    Then do the same with both at the same time and the memory divided, to compare.
    """
    model, prompts = make_model(folder), folder / "prompts.jsonl"
    write_prompts(prompts, 32, 64, models.SIZES["0.6b"].vocab_size)
    words = ("--hf-model", str(model), "--prompts", str(prompts), "--reward", "length:32", *SMALL_RUN)
    measured: dict[str, Any] = {}
    for way in ("sleep", "share"):
        # The seeds of a run follow from its name.
        run = folder / way / "turns"
        metrics = train(
            run, "--platform", "cuda", "--bf16", "--rollout-colocate", way, "--schedule", "sync", "--consume-order",
            "prompt", "--train-iters", "4", EAGER, *words,
        )  # fmt: skip
        report = verify(run)
        measured[way] = {
            "seconds": [one["time"] for one in metrics], "breaches": len(report.breaches),
            "fingerprints": [one["fingerprint"] for one in metrics],
            "proven": f"{report.proofs.num_whole} of {report.proofs.num_reports}",
            "slept": re.findall("Sleep mode freed .*", "".join(log.read_text() for log in (run / "logs").iterdir())),
        }  # fmt: skip
        write_aside(folder / "turns.json", measured)
    if measured["sleep"]["breaches"] or len(measured["sleep"]["slept"]) < 4:
        raise PartError(measured)
    return measured


def make_model(folder: Path) -> Path:
    """Return the folder of a random model of 0.6 B parameters, which `make gpu-bench`'s parts use too."""
    return models.make_once(folder / "models" / "0.6b", models.SIZES["0.6b"], "cuda")


def find_drift(folder: Path) -> Result:
    """Compare the parts of engine and trainer on the demo's responses, which stop early."""
    run = folder / "demo" / "run"
    if not run.exists():
        raise PartError({"reason": "run the part `demo` before: this part examines its run"})
    return {"lines": call("-m", "megatron_rl.cli", "drift", run).splitlines()[-2 * NUM_LAST_LINES :]}


def compare_utilization(folder: Path) -> Result:
    """Start an engine with 0.9 of the GPU, then the same with 0.5: the second must have a smaller cache."""
    model, measured = make_model(folder), {}
    for share in ("0.9", "0.5"):
        run = folder / f"utilization-{share}"
        shutil.rmtree(run, ignore_errors=True)
        flags = f"{EAGER} --gpu-memory-utilization {share}"
        words = ("--platform", "cuda", "--seq-length", "256", "--hf-model", str(model), "--reward", "length:8")
        with sidecar(run, *words, "--rollout-devices", "0", "--rollout-max-num-seqs", "8", flags):
            log = "".join(path.read_text() for path in (run / "logs").iterdir())
        measured[share] = int(_CACHE.findall(log)[-1].replace(",", ""))
    if measured["0.5"] > 0.7 * measured["0.9"]:
        raise PartError(measured)
    return measured


def repeat_linear(folder: Path) -> Result:
    """Train a model with linear layers twice for two steps with --deterministic-mode: the bits must be equal."""
    from tests import hf_models

    model, prompts = folder / "models" / "qwen3_next", folder / "prompts-linear.jsonl"
    hf_models.draw("qwen3_next", model)
    random_models.make_tokenizer(model, hf_models.VOCAB_SIZE)
    write_prompts(prompts, 32, 64, hf_models.VOCAB_SIZE)
    words = ("--hf-model", str(model), "--prompts", str(prompts), "--reward", "length:8", *SMALL_RUN)
    # The seeds of a run follow from its name.
    first, second = (without_times(train(folder / "linear", *LINEAR_RUN, *words)) for _ in range(2))
    result = {"gradient_norms": [[one["gradient_norm"] for one in metrics] for metrics in (first, second)]}
    if first != second:
        raise PartError(result)
    return result


# In the order in which they run: the last ones are left out if time is short.
PARTS: Mapping[str, Part] = {
    "packages": Part(15, find_packages),
    "kernels": Part(60, check_kernels),
    "demo": Part(160, run_demo),
    "step_0.6b": Part(60, functools.partial(measure_part, "step_0.6b")),
    "step_4b": Part(45, functools.partial(measure_part, "step_4b")),
    "attention": Part(45, functools.partial(measure_part, "attention")),
    "publish": Part(95, publish_each_way),
    "turns": Part(75, take_turns),
    "drift": Part(55, find_drift),
    "utilization": Part(70, compare_utilization),
    "linear": Part(40, repeat_linear),
}


if __name__ == "__main__":
    sys.exit(main())
