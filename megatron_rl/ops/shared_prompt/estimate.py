"""Which of two backends a GPU should run for a shape, by arithmetic: nothing of this has been timed.

A kernel takes at least its products at the chip's peak, or its bytes at the speed of its memory. `triton` has the more
products, since its backward computes scores twice and its blocks are whole; `merge` moves rows between its calls, in
float32 where it merges. So `triton` gains where responses are short or many beside their prompt. Speeds are an H100's;
of other chips the two are in about the same proportion. `benchmarks/roofline.py` counts kernel by kernel.
"""

import dataclasses

# Products in bf16 and bytes of memory, a second.
_FLOPS, _BYTES = 989e12, 3.35e12
_BLOCK = 128
_SIZE = 2


@dataclasses.dataclass(frozen=True)
class GroupShape:
    """The longest group of a run, and the heads that attend."""

    prompt: int
    response: int
    num_responses: int
    num_heads: int
    num_groups: int
    """Heads of keys and values."""
    head_dim: int

    @property
    def num_tokens(self) -> int:
        return self.prompt + self.num_responses * self.response


def estimate_gain(shape: GroupShape) -> float:
    """Return how many times `triton` should be as fast as `merge`, forward and backward together."""
    return _estimate_merge(shape) / _estimate_triton(shape)


def _estimate_triton(shape: GroupShape) -> float:
    rounded = dataclasses.replace(shape, response=-(-shape.response // _BLOCK) * _BLOCK)
    # 2 products forward, 3 for the gradient of queries, 4 for those of keys and values.
    flops = 2.0 * (2 + 3 + 4) * shape.head_dim * shape.num_heads * _count_pairs(rounded)
    num_bytes = _SIZE * 8.0 * shape.num_tokens * shape.head_dim * (shape.num_heads + shape.num_groups)
    return max(flops / _FLOPS, num_bytes / _BYTES)


def _estimate_merge(shape: GroupShape) -> float:
    flops = 2.0 * (2 + 5) * shape.head_dim * shape.num_heads * _count_pairs(shape)
    tokens, below, above = shape.num_tokens, shape.num_responses * shape.response, shape.prompt
    heads, groups = shape.num_heads * shape.head_dim, shape.num_groups * shape.head_dim
    in_calls = _SIZE * 6.0 * ((tokens + below) * heads + (tokens + above) * groups)
    # To and from float32, taken out, merged, put back: bytes of a number of a row, forward and backward.
    between = heads * (24.0 * tokens + 66 * below) + groups * (24.0 * tokens + 52 * above)
    return max(flops / _FLOPS, in_calls / _BYTES) + between / _BYTES


def _count_pairs(shape: GroupShape) -> float:
    """Count the pairs of a token and one that it sees."""
    of_response = shape.response * shape.prompt + shape.response**2 / 2
    return shape.prompt**2 / 2 + shape.num_responses * of_response
