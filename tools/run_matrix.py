"""Run on each version of megatron-core, in an environment of its own, the tests that it must not break; print a table.

    make test-matrix            # all of it
    make test-matrix-quick      # the newest version, as make test-all runs it

`numbers` trains the same models on each version, three models in one pass too, and compares all results with
0.16.1 on the same Python. `reads` resumes from the checkpoints that the others wrote; the quick one, from those of
0.16.1. The output of a part is in build/matrix.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "matrix"
# The version that `make test` runs on, and the same one in the environment that the others share.
MAIN, REFERENCE = "0.16.1", "0.16.1 (3.12)"
ENVIRONMENTS = {
    MAIN: ".venv",
    REFERENCE: ".venv-mcore-0.16.1",
    "0.17.1": ".venv-mcore-0.17.1",
    "0.18.2": ".venv-mcore-0.18.2",
    "0.19.2": ".venv-mcore-0.19.2",
}
NEWEST = "0.19.2"
# Its wheel has the megatron.training that tests/megatron_lm knows; and every test of the quick part costs each change.
OF_NEWEST_ALONE = {"full": ("megatron.training",), "quick": ("loop",)}

PARTS = {
    "core": (
        "tests/mcore",
        "tests/distributed/test_models.py",
        "tests/distributed/test_grpo_step.py",
        "tests/distributed/test_optimizer.py",
        "tests/distributed/test_context.py",
        "tests/distributed/test_linear_layers.py",
        "tests/distributed/test_auxiliary_losses.py",
        "tests/distributed/test_lora.py",
        "tests/distributed/test_lora_state.py",
        "tests/unit/test_platforms.py",
        "tests/unit/test_every_flag.py",
    ),
    "loop": ("tests/e2e/test_loop.py", "tests/e2e/test_resume.py"),
    "tri-model": ("tests/distributed/test_tri_model.py", "tests/distributed/test_frozen_memory.py"),
    "checkpoints": (
        "tests/unit/test_megatron_fixes.py",
        "tests/distributed/test_checkpoint.py",
        "tests/distributed/test_training_checkpoint.py",
        "tests/distributed/test_optimizer_slices.py",
    ),
    "megatron.training": ("tests/megatron_lm",),
}
QUICK = {"loop": ("tests/e2e/test_loop.py", "-m", "not each_change and not slow")}


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a part on one version."""

    is_passed: bool
    seconds: float
    said: str

    def __str__(self) -> str:
        return f"{self.said}, {self.seconds:.0f} s"


def run(version: str, name: str, words: list[str]) -> tuple[int, float, str]:
    """Run a module in the version's environment; return its exit code, the seconds and its output."""
    log = OUT / f"{version.replace(' ', '-')}-{name}.log"
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [str(ROOT / ENVIRONMENTS[version] / "bin" / "python"), "-m", *words]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    return code, time.monotonic() - began, log.read_text(encoding="utf-8", errors="replace")


def run_tests(version: str, part: str, words: tuple[str, ...]) -> Result:
    """Run a part's tests and say how many passed."""
    marks = [] if "-m" in words else ["-m", "not slow"]
    code, seconds, output = run(version, part, ["pytest", "-q", "-p", "no:cacheprovider", *words, *marks])
    counts = re.findall(r"(\d+) (passed|failed|error)", output.splitlines()[-1] if output else "")
    said = ", ".join(f"{count} {what}" for count, what in counts) or f"exit code {code}"
    return _tell(version, part, Result(code == 0, seconds, said), output)


def write_numbers(version: str, folder: Path, is_quick: bool) -> Result:
    """Train on a version, and keep the results."""
    words = ["tests.matrix.across", "write", str(folder), version, *(["quick"] if is_quick else [])]
    code, seconds, output = run(version, "numbers", words)
    return _tell(version, "numbers", Result(code == 0, seconds, "written" if code == 0 else "failed"), output)


def compare_numbers(folder: Path, written: dict[str, Result]) -> dict[str, Result]:
    """Check that the numbers are those of 0.16.1, bit for bit."""
    code, _, output = run(REFERENCE, "compare", ["tests.matrix.across", "compare", str(folder), REFERENCE])
    if code != 0:
        print(output)
        return written
    results = dict(written)
    for version, found in json.loads(output.splitlines()[-1]).items():
        different = found["different"]
        said = f"{found['tensors'] - len(different)} of {found['tensors']} equal"
        if different:
            said += f", the others within {max(different.values()):.0e}"
        # Another build of torch sums in another order.
        is_passed = not different or version == MAIN
        results[version] = Result(is_passed, written[version].seconds, said)
    return results


def read_checkpoints(version: str, folder: Path, writers: list[str]) -> Result:
    """Resume from the checkpoints of these versions."""
    code, seconds, output = run(version, "reads", ["tests.matrix.across", "read", str(folder), version, *writers])
    if code != 0:
        return _tell(version, "reads", Result(False, seconds, "failed"), output)
    told = json.loads((folder / version / "read.json").read_text())
    refused = [other for other, differences in told.items() if any("cannot read" in one for one in differences)]
    # Written on another build of torch, or by a version with other numbers.
    exact = [other for other, differences in told.items() if not differences]
    wrong = [other for other in told if other not in (*refused, *exact) and MAIN not in (other, version)]
    said = f"{len(told) - len(refused)} of {len(told)}"
    said += f", not {', '.join(refused)}" if refused else ""
    return Result(not wrong, seconds, said)


def _tell(version: str, part: str, result: Result, output: str) -> Result:
    print(f"{version:<14} {part:<18} {result}", flush=True)
    if not result.is_passed:
        print("\n".join(output.splitlines()[-60:]), flush=True)
    return result


def table(results: dict[str, dict[str, Result]]) -> str:
    """Return a row a version, a column a part, as the documents have it."""
    parts = list(dict.fromkeys(part for row in results.values() for part in row))
    lines = [f"| megatron-core | {' | '.join(parts)} |", f"| --- |{' --- |' * len(parts)}"]
    for version, row in results.items():
        lines.append(f"| {version} | {' | '.join(str(row.get(part, '')) for part in parts)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="the loop, the numbers of two layouts, and the checkpoints of 0.16.1 alone"
    )
    parser.add_argument("versions", nargs="*", help=f"of {', '.join(ENVIRONMENTS)}; all of them if none is named")
    arguments = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    versions = arguments.versions or [*ENVIRONMENTS]
    results: dict[str, dict[str, Result]] = {version: {} for version in versions}
    for version in versions:
        for part, words in (QUICK if arguments.quick else PARTS).items():
            is_left_out = part in OF_NEWEST_ALONE["quick" if arguments.quick else "full"] and version != NEWEST
            if not is_left_out and version != REFERENCE:
                results[version][part] = run_tests(version, part, words)
    with tempfile.TemporaryDirectory(prefix="numbers-", dir=OUT) as temporary:
        folder = Path(temporary)
        written = {
            version: write_numbers(version, folder, arguments.quick)
            for version in dict.fromkeys([REFERENCE, *versions])
        }
        for version, result in compare_numbers(folder, written).items():
            results.setdefault(version, {})["numbers"] = result
        for version in versions:
            writers = [REFERENCE] if arguments.quick else [name for name in written if written[name].is_passed]
            results[version]["reads"] = read_checkpoints(version, folder, writers)
    print(f"\n{table(results)}")
    return 0 if all(result.is_passed for row in results.values() for result in row.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
