"""Megatron's own kernels for its batch-invariant mode, under our model."""

import pytest

from tests.kernels.processes import run_module


@pytest.mark.each_change
@pytest.mark.timeout(900)
def test_a_model_with_megatrons_invariant_kernels_is_that_of_transformers() -> None:
    # In a process of its own: Triton decides whether to interpret when it is first imported.
    run_module("pytest", "-q", "tests/kernels/interpreted_batch_invariant_mode.py", TRITON_INTERPRET="1")
