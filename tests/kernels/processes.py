"""Processes in which Triton interprets, or compiles for other devices."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import ROOT

# Triton names what it keeps by a digest of the sources, the target and the options.
_COMPILED = ROOT / "build" / "triton"


def compile_kernels(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module that compiles kernels, unless it has compiled the same before, and return what it says of each."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    assert (Path(spec.origin).parent / "backends/nvidia/bin/ptxas").exists(), "triton compiles for GPUs by its ptxas"
    output = run_module(module, *arguments, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(_COMPILED))
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


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
