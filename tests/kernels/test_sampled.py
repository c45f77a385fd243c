"""The kernel that scores sampled tokens, compiled; test_interpreted.py has it interpreted."""

import pytest

from tests.kernels.processes import compile_kernels

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(900)]


def test_the_compiled_kernel_keeps_its_numbers_in_registers() -> None:
    found = compile_kernels("tests.kernels.compiled_sampled", "80", "90", "gfx942")
    assert len(found) == 9
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        # Two programs of 256 threads fit a multiprocessor's 65,536 registers, and two of 512 lanes a compute unit's.
        assert kernel["registers"] <= 128, kernel
