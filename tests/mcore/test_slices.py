"""Ranges of a tensor's elements as boxes."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.trainer.mcore.checkpoint.slices import boxes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    start, end = sorted(draw(st.integers(0, math.prod(shape))) for _ in range(2))
    return shape, start, end


@given(ranges())
def test_boxes_hold_the_elements_of_the_range_in_their_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    """Check that each axis but the last adds at most two boxes, too."""
    shape, start, end = drawn
    numbered = torch.arange(math.prod(shape)).view(shape)
    found: list[int] = []
    assert len(list(boxes(*drawn))) <= 2 * len(shape) - 1
    for offset, size in boxes(shape, start, end):
        box = numbered[tuple(slice(at, at + length) for at, length in zip(offset, size, strict=True))]
        assert box.shape == size
        found += box.flatten().tolist()
    assert found == list(range(start, end))


def test_a_range_of_no_elements_has_no_box() -> None:
    assert list(boxes((3, 4), 5, 5)) == list(boxes((3, 4), 5, 2)) == []
