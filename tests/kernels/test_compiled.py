"""Our kernels, compiled for chips that need not be present: registers, memory and instructions."""

from typing import Any

import pytest

from tests.kernels.processes import compile_kernels

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(900)]

EVERY_CHIP = "80 86 89 90 100 120 gfx942"


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("family", "words", "number"),
    [
        ("attention", "90 gfx942", 2 * 4),
        # The tightest one.
        ("attention", "86 --head-dims 256", 4),
        slow("attention", f"{EVERY_CHIP} --all", 7 * 4 * 3 * 5),
        ("join", "80 90 100", 3 * 2),
        ("elementwise", "80 90 100 gfx942", 4 * 16),
        slow("elementwise", f"{EVERY_CHIP} --all", 7 * 48),
        ("output_layer", "80 90 100 gfx942", 4 * 12),
        slow("output_layer", f"{EVERY_CHIP} --all", 7 * 36),
        ("heads", "80 90 100 gfx942", 4 * 10),
        slow("heads", "86 89 120", 3 * 10),
        ("sampled", "80 90 gfx942", 3 * 3),
        ("slices", "90 gfx942", 2 * 18),
        slow("slices", f"{EVERY_CHIP} --all", 7 * 36),
    ],
)
def test_compiled_kernels_fit_a_chip_spill_nothing_and_load_16_bytes_at_once(
    family: str, words: str, number: int
) -> None:
    compiled = compile_kernels("tests.kernels.compiled", family, *words.split())
    assert len(compiled) == number
    for kernel in compiled:
        name = kernel["kernel"]
        assert kernel["shared_memory"] <= kernel["most_shared_memory"], kernel
        # Attention may spill 16 numbers in half precision, and any in fp32; slices may spill two of 64 bits.
        most_stack = {"attention": 64, "slices": 16}.get(family, 0)
        assert kernel["stack"] <= most_stack or (family == "attention" and kernel["dtype"] == "fp32"), kernel
        # Each lane of a digest is added at once.
        assert kernel["num_atomics"] == (2 if name == "digest_kernel" else 0), kernel
        if family in ("elementwise", "output_layer", "heads"):
            assert (kernel["num_wide_loads"] > 0) == (name != "join_kernel"), kernel
        if family == "attention" and kernel["dtype"] != "fp32":
            assert kernel["num_tensor_core_instructions"] > 0 or name == "sum_kernel", kernel
        if family == "output_layer":
            assert (kernel["num_divisions"] > 0) == kernel["IS_SCALED"], kernel
        if family == "sampled":
            # Two programs of 256 threads fit a multiprocessor's 65,536 registers, two of 512 lanes a compute unit's.
            assert kernel["registers"] <= 128, kernel
