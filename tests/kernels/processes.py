"""Processes in which Triton interprets, or compiles for other devices."""

import os
import subprocess
import sys

from tests.processes import ROOT


def run_module(module: str, *arguments: str, **environment: str) -> str:
    """Run a module as a program, and return what it printed."""
    result = run_to_end(module, *arguments, **environment)
    assert result.returncode == 0, result.stdout
    return result.stdout


def run_to_end(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a program to its end, a good one or not; both streams are in `stdout`."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
        check=False,
    )
