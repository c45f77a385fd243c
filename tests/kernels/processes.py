"""Processes in which Triton interprets, or compiles for other devices."""

import os
import subprocess
import sys

from tests.processes import ROOT


def run_module(module: str, *arguments: str, **environment: str) -> str:
    """Run a module as a program, and return what it printed."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout
