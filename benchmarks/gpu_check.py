"""Check that our kernels are right on this GPU; for shared-prompt attention, that bits repeat, and how fast it is.

It needs torch and numpy, and the packages of a backend; not megatron, pytest or an installed package. Rightness comes
first: forward and all gradients against the definition in float64, in half precision over several draws. Each backend
of attention, and each other kernel, is tried in a process of its own, so that one that breaks its GPU context or never
ends does not stop the others. Then come times of attention, against the same sequences whole, as tables for
docs/kernels.md. Exit code 1 if a check failed, 3 if the machine has no GPU. On the CPU (`--device cpu`) all sizes are
tiny, times mean nothing, and the kernels run in Triton's interpreter.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import itertools
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks import gpu_times, report
from benchmarks.gpu_times import Row
from benchmarks.kernels import checks
from benchmarks.kernels.registry import NAMES as KERNELS
from megatron_rl.errors import ExitCode
from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.shared_prompt_cases import BRANCHED, NAMES, RAGGED, Case, errors, mean_squares, token_errors

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Query heads and key-value heads, and the head dimension; the most usual first.
HEADS = (((4, 2), 128), ((4, 1), 64), ((4, 4), 96), ((4, 2), 256), ((4, 1), 128), ((4, 4), 64))
HEADS_ON_CPU = (((4, 2), 64),)
WINDOW = 40
# Long enough that backends which divide long work do.
LONG = Layout.of_groups([(4096, [1024, 900, 1, 1100])])
LONG_ON_CPU = Layout.of_groups([(150, [90, 1, 70])])
# Groups that `cudnn` computes in batched calls, and whose lengths are not those of blocks.
EQUAL = Layout.of_groups([(200, [130] * 4), (200, [130] * 4), (77, [91] * 2)])
REPEATED = Layout.of_groups([(2100, [300] * 8), (64, [500, 3])])
# Backends that must give the same again; merge and gather add gradients up in no fixed order there, and cudnn
# promises nothing.
SAME_BITS = ("triton", "flash")
FP32_BOUND = 2.4e-6
# One draw's largest error is luck: it moves by a factor of two between draws. A token's mean error over these does not.
DRAWS = 4
# Seconds that a backend may take for all cases, after which the rest is left out, and seconds of its process.
CASE_SECONDS, PROCESS_SECONDS = 150.0, 240.0


@dataclasses.dataclass(frozen=True)
class Question:
    """One case for a backend."""

    name: str
    layout: Layout
    heads: tuple[int, int]
    head_dim: int
    dtype_name: str
    window: int | None = None

    def conditions(self, device: str) -> Conditions:
        return Conditions(device, DTYPES[self.dtype_name], self.window, self.head_dim)

    def case(self, device: str, draw: int = 0) -> Case:
        return Case.draw(self.layout, self.heads, self.head_dim, DTYPES[self.dtype_name], self.window, draw).on(device)

    def __str__(self) -> str:
        window = f", a window of {self.window}" if self.window else ""
        return f"{self.dtype_name} {self.name}, {self.heads[0]}/{self.heads[1]} heads of {self.head_dim}{window}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--backend", choices=BACKENDS, help="check this one alone, in this process, without times")
    alone.add_argument("--kernels", choices=KERNELS, nargs="+", help="the same of kernels beside attention")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        print("no GPU that torch can use: run this on a machine with one, or with --device cpu", file=sys.stderr)
        return ExitCode.ENVIRONMENT
    if parsed.backend:
        return _finish(list(check(parsed.backend, parsed.device)))
    if parsed.kernels:
        return _finish([failure for name in parsed.kernels for failure in checks.check(name, parsed.device)])
    names = _introduce(parsed.device)
    failures, broken = _ask_all(list_processes(names, parsed.device), parsed.device)
    rows: list[Row] = []
    try:
        for row in gpu_times.measure([name for name in names if name not in broken], parsed.device):
            rows.append(row)
    except Exception as error:
        failures.append(f"times after {len(rows)} shapes: {_in_a_line(error)}")
    gpu_times.print_tables(rows)
    code = _finish(failures)
    report.finish({"failed_checks": len(failures), **gpu_times.figures(rows)})
    return code


def list_processes(names: Sequence[str], device: str) -> dict[str, list[str]]:
    """Return the flags of each process: one for each backend of attention, and one for each other kernel.

    On the CPU one process has all kernels, because its imports take longer than they do.
    """
    of_kernels = {name: [name] for name in KERNELS} if device == "cuda" else {"kernels": list(KERNELS)}
    return {name: ["--backend", name] for name in names} | {
        name: ["--kernels", *some] for name, some in of_kernels.items()
    }


def check(name: str, device: str) -> Iterator[str]:
    """Yield what is wrong with a backend."""
    yield from check_rightness(name, device)
    yield from check_repeatability(name, device)
    yield from check_shapes(name, device)


def check_rightness(name: str, device: str) -> Iterator[str]:
    """Yield errors that are too large; print the largest of each case as a part of its bound."""
    end = time.perf_counter() + CASE_SECONDS
    asked = [one for one in questions(device) if BACKENDS[name].refusal(one.conditions(device)) is None]
    for number, question in enumerate(asked):
        if time.perf_counter() > end:
            print(f"{name}: {number} of {len(asked)} cases, then out of time", flush=True)
            return
        try:
            ratios = compare(question, BACKENDS[name].attention, device)
        except Exception as error:
            yield f"{name}, {question}: {_in_a_line(error)}"
            continue
        print(f"{name}, {question}: {_numbers(ratios)}", flush=True)
        # Written so that a value that is not a number fails.
        yield from (f"{name}, {question}: {tensor} {ratio:.2f}" for tensor, ratio in ratios.items() if not ratio <= 1)


def compare(question: Question, attention: Callable[..., torch.Tensor], device: str) -> dict[str, float]:
    """Return the error of each tensor, as a part of its bound."""
    if question.dtype_name == "fp32":
        return _compare_largest(question.case(device), attention)
    return _compare_tokens((question.case(device, draw) for draw in range(DRAWS)), attention)


def questions(device: str) -> Iterator[Question]:
    """Yield the cases, the most usual first."""
    layouts = {"ragged": RAGGED, "branched": BRANCHED, **({"equal": EQUAL} if device == "cuda" else {})}
    all_heads = HEADS if device == "cuda" else HEADS_ON_CPU
    yield Question("long", LONG if device == "cuda" else LONG_ON_CPU, (4, 1), 128, "bf16")
    for dtype_name, (heads, head_dim), (name, layout) in itertools.product(DTYPES, all_heads, layouts.items()):
        yield Question(name, layout, heads, head_dim, dtype_name)
    for name, layout in (("ragged", RAGGED), ("branched", BRANCHED)):
        yield Question(name, layout, (4, 2), 64, "bf16", WINDOW)


def check_repeatability(name: str, device: str) -> Iterator[str]:
    """Yield differences in the bits of a backend that promises the same; print its results."""
    repeated = EQUAL if name == "cudnn" else REPEATED
    question = Question("repeated", repeated if device == "cuda" else RAGGED, (8, 2), 64, "bf16")
    if BACKENDS[name].refusal(question.conditions(device)) is not None:
        return
    case = question.case(device)
    try:
        first, *others = (case.run(BACKENDS[name].attention) for _ in range(3))
    except Exception as error:
        yield f"{name}, {question}: {_in_a_line(error)}"
        return
    different = [
        tensor
        for tensor, *runs in zip(NAMES, first, *others, strict=True)
        if not all(torch.equal(runs[0], run) for run in runs[1:])
    ]
    print(
        f"{name}, three runs: {'other bits of ' + ', '.join(different) if different else 'the same bits'}", flush=True
    )
    if different and name in SAME_BITS:
        yield f"{name}, three runs: other bits of {', '.join(different)}"


def check_shapes(name: str, device: str) -> Iterator[str]:
    """Yield shapes whose times will be asked for, and that it cannot compute."""
    for shape in gpu_times.shapes(device):
        for make in gpu_times.shared(shape, [name], device).values():
            try:
                is_finite = make().is_finite()
            except Exception as error:
                yield f"{name}, {shape.name}: {_in_a_line(error)}"
                continue
            if not is_finite:
                yield f"{name}, {shape.name}: a result is not a number"


def _introduce(device: str) -> list[str]:
    """Print the backends that can run, except the definition, and return them."""
    packages = []
    for package in ("torch", "triton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{package} {importlib.metadata.version(package)}")
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}: {', '.join(packages)}")
    names = []
    for name, one in BACKENDS.items():
        refusals = {one.refusal(Conditions(device, dtype)) for dtype in DTYPES.values()}
        if None in refusals and name != "naive":
            names.append(name)
        for refusal in filter(None, refusals):
            print(f"{name}: {refusal}")
    return names


def _ask_all(asked: Mapping[str, Sequence[str]], device: str) -> tuple[list[str], set[str]]:
    """Ask all at once, by their flags; return the failures, and the names that broke off or did not end."""
    print("\nlargest error / its bound", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", device]
    # On the CPU no backend of attention that is asked needs the interpreter.
    environment = os.environ if device == "cuda" else {**os.environ, "TRITON_INTERPRET": "1"}
    processes = {name: subprocess.Popen([*command, *words], env=environment) for name, words in asked.items()}
    end = time.monotonic() + PROCESS_SECONDS
    failures, broken = [], set()
    for name, process in processes.items():
        try:
            code = process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code != ExitCode.OK:
            failures.append(f"{name}: its process ended with {code}")
        if code not in (ExitCode.OK, ExitCode.CRASH):
            broken.add(name)
    return failures, broken


def _finish(failures: list[str]) -> int:
    for failure in failures:
        print(f"FAILED: {failure}", flush=True)
    return ExitCode.CRASH if failures else ExitCode.OK


def _compare_largest(case: Case, attention: Callable[..., torch.Tensor]) -> dict[str, float]:
    """Compare the largest error of a tensor with a part of its largest number."""
    exact = case.exact()
    found = errors(case.run(attention), exact)
    return {name: _ratio(found[name], FP32_BOUND * _largest(tensor)) for name, tensor in zip(NAMES, exact, strict=True)}


def _compare_tokens(cases: Iterable[Case], attention: Callable[..., torch.Tensor]) -> dict[str, float]:
    """Compare each token's error with twice that of the definition in the same precision.

    An error is the root mean square over all draws, heads and their numbers, so neither side has it by luck, and one
    wrong token is found among many. A token that the definition computes exactly, as one that sees only itself, may be
    wrong by a unit in the last place of the tensor's root mean square.
    """
    sums: dict[str, list[Any]] = {}
    unit = 0.0
    for case in cases:
        unit = torch.finfo(case.q_THD.dtype).eps
        exact = case.exact()
        found, definition = (token_errors(case.run(run), exact) for run in (attention, BACKENDS["naive"].attention))
        for name, tensor in zip(NAMES, exact, strict=True):
            terms = (found[name], definition[name], mean_squares(tensor))
            sums[name] = [total + term for total, term in zip(sums.get(name, [0.0] * 3), terms, strict=True)]
    return {
        name: _largest(error_T.sqrt() / (2 * naive_T.sqrt() + unit * truth_T.mean().sqrt()))
        for name, (error_T, naive_T, truth_T) in sums.items()
    }


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item()


def _ratio(error: float, bound: float) -> float:
    if bound:
        return error / bound
    return math.inf if error else 0.0


def _numbers(ratios: dict[str, float]) -> str:
    return ", ".join(f"{tensor} {ratio:.2f}" for tensor, ratio in ratios.items())


def _in_a_line(error: Exception) -> str:
    traceback.print_exc()
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    sys.exit(main())
