"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def unwritten_memory_is_nan() -> Iterator[None]:
    """Fill memory that kernels do not write with what is not a number."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
