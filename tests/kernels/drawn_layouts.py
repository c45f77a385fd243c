"""Layouts that hypothesis draws."""

from hypothesis import strategies as st

from megatron_rl.ops.shared_prompt.layout import ROOT, Layout


@st.composite
def layouts(draw: st.DrawFn, longest: int = 6) -> Layout:
    """Draw any forest of up to nine segments, including empty ones."""
    num_segments = draw(st.integers(1, 9))
    lengths = draw(st.lists(st.integers(0, longest), min_size=num_segments, max_size=num_segments))
    parents = [draw(st.integers(ROOT, segment - 1)) for segment in range(num_segments)]
    return Layout(tuple(lengths), tuple(parents))
