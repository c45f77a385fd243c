"""The kernel that scores sampled tokens, compiled; test_interpreted.py has it interpreted."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.kernels.processes import run_module

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(900)]


def test_the_compiled_kernel_keeps_its_numbers_in_registers(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("triton")
    if spec is None or not (Path(spec.origin).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("the package triton has no ptxas")
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    output = run_module("tests.kernels.compiled_sampled", "80", "90", "gfx942", **environment)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(found) == 9
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        # Two programs of 256 threads fit a multiprocessor's 65,536 registers, and two of 512 lanes a compute unit's.
        assert kernel["registers"] <= 128, kernel
