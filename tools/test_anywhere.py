"""Run tests as other machines would: other processors, numbers of threads, temporary folders, places of the clone.

    make test-anywhere                        # all rows, one after another
    python -m tools.test_anywhere avx2 clone  # the rows whose names have one of these texts

A row that goes red prints the end of its output; build/anywhere has all of it.
"""

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "anywhere"
THREADS = "TEST_THREADS"
"""The variable with the number of threads that torch has in tests (tests/nursery.py)."""
_NUM_LAST_LINES = 60
# Of bits, bounds and numerics.
NUMERICS = (
    "tests/kernels/test_invariant.py",
    "tests/kernels/test_gated_delta.py",
    "tests/unit/test_log_probs.py",
    "tests/unit/test_linear.py",
    "tests/unit/test_adam.py",
    "tests/unit/test_onednn.py",
    "tests/unit/test_losses.py",
    "tests/unit/test_fingerprint.py",
    "tests/unit/test_truth.py",
    "tests/sidecar/test_vllm_invariant.py",
    "tests/distributed/test_batch_invariant.py",
)
# Of numerics too, in all layouts: half a minute.
LAYOUTS = "tests/distributed/test_main_gradients.py"
# Of processes, sockets and signals.
PROCESSES = (
    "tests/unit/test_temporary.py",
    "tests/unit/test_interrupts.py",
    "tests/unit/test_launcher.py",
    "tests/unit/test_launch.py",
    "tests/unit/test_listening.py",
    "tests/unit/test_invariant_flags.py",
    "tests/unit/test_remote_host.py",
    "tests/unit/test_watch.py",
    "tests/sidecar/test_http.py",
)
# What starts processes by paths of the clone.
PLACES = (
    "tests/hosts/test_namespaces.py",
    "tests/unit/test_launcher.py",
    "tests/unit/test_interrupts.py",
    "tests/unit/test_rewards_pool.py",
    "tests/unit/test_environment_pool.py",
    "tests/unit/test_no_room.py",
    "tests/e2e/test_loop.py::test_periodic_and_sync_end_in_the_same_weights_whatever_the_arrival",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Settings that stand for another machine, and the tests that must pass under them."""

    name: str
    files: tuple[str, ...]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    clone: str | None = None
    """The place of a clone to run in, below the temporary folder /tmp; None runs in this one."""
    temporary_bytes: int = 0
    """The length of the path of the temporary folder; 0 for the usual one."""
    ignores_interrupts: bool = False


# What ATen and MKL choose on a processor without AVX-512.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
ROWS = (
    Row("ATen's plain kernels, 2 threads", NUMERICS, {"ATEN_CPU_CAPABILITY": "default", THREADS: "2"}),
    Row("avx2 kernels and products, 1 thread", (*NUMERICS, LAYOUTS), AVX2),
    Row("avx2 kernels and products, 2 threads", NUMERICS, {**AVX2, THREADS: "2"}),
    Row("SIGINT ignored, TMPDIR of 60 bytes", PROCESSES, temporary_bytes=60, ignores_interrupts=True),
    Row("a clone in /tmp, in a folder with a space", PLACES, clone="a clone"),
)


def main(words: list[str]) -> int:
    """Run the rows, and return the exit code."""
    rows = [row for row in ROWS if not words or any(word in row.name for word in words)]
    OUT.mkdir(parents=True, exist_ok=True)
    # Each of them, also those after a red one.
    codes = [run(row) for row in rows]
    return 1 if any(codes) or not rows else 0


def run(row: Row) -> int:
    """Run a row's tests, print a line about them, and return the exit code of pytest."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anywhere-", dir="/tmp")))
        root = ROOT if row.clone is None else clone(folder / row.clone)
        # Two threads of each process would spin while they wait for each other: see tests/conftest.py.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **row.variables}
        if row.temporary_bytes:
            environment["TMPDIR"] = str(folder / ("x" * (row.temporary_bytes - len(f"{folder}/"))))
            Path(environment["TMPDIR"]).mkdir()
        if row.ignores_interrupts:
            stack.enter_context(interrupts_ignored())
        words = ["-m", "not slow", "-q", "-p", "no:cacheprovider", "--numprocesses", "2", *row.files]
        done = subprocess.run(
            [root / ".venv" / "bin" / "python", "-m", "pytest", *words],
            cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    lines = done.stdout.splitlines()
    (OUT / f"{re.sub('[^a-z0-9]+', '-', row.name.lower())}.log").write_text(done.stdout)
    print(f"{row.name:<42} {lines[-1] if lines else ''} ({time.monotonic() - began:.0f} s)", flush=True)
    if done.returncode:
        print("\n".join(lines[-_NUM_LAST_LINES:]), flush=True)
    return done.returncode


def clone(place: Path) -> Path:
    """Copy this checkout as it is, with an environment of its own on top of this one's packages."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.split(b"\0")
    for name in map(os.fsdecode, filter(None, names)):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    environment = place / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path("lib", version, "site-packages")
    lines = (str(place), f"import site; site.addsitedir({str(Path(sys.prefix) / packages)!r})", "")
    (environment / packages / "base.pth").write_text("\n".join(lines))
    shutil.copy2(Path(sys.prefix) / "installed.lock", environment)
    # Does nothing in an environment that has everything.
    subprocess.run(["make", "--silent", "env"], cwd=place, check=True)
    return place


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT in this process and in those that it starts, as nohup's shell does."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
