"""Bound the speed of shared-prompt attention on a chip, by its arithmetic and its bytes: nothing is timed.

    python -m benchmarks.roofline [--chip h100]

Forward and backward of a group in bf16, as `gpu_times` has them. A kernel takes at least its products at the chip's
peak, and its bytes at the speed of its memory. `triton` computes whole blocks, and reads each tensor once in each of
its kernels; `merge` computes only visible pairs, by kernels of torch's, and moves rows between its calls. The cost
of starting calls is left out, and so is the distance of a kernel from its peak.
"""

import argparse
import dataclasses
from collections.abc import Iterator

import torch

from benchmarks.gpu_times import BACKWARD, SHAPES, Shape
from megatron_rl.ops.shared_prompt.backends.triton_blocks import Blocks, Chip, choose_blocks
from megatron_rl.ops.shared_prompt.layout import Strand, find_strands

_BYTES = 2
# A kernel's products for each pair: of queries and keys; with the values; those of their gradients.
_FORWARD, _QUERY_GRADIENTS, _KEY_GRADIENTS = 2, 3, 4


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The speeds in a chip's data sheet."""

    flops: float
    """Operations a second of dense products in bf16."""
    bytes: float
    """Bytes a second of its memory."""
    chip: Chip

    @property
    def ridge(self) -> float:
        """FLOP a byte: below this, a kernel waits for memory."""
        return self.flops / self.bytes

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Return the least time of one kernel."""
        return max(flops / self.flops, num_bytes / self.bytes)


CHIPS = {
    "a100": Speeds(312e12, 2.039e12, Chip("cuda", 8, 163 * 1024)),
    "h100": Speeds(989e12, 3.35e12, Chip("cuda", 9, 227 * 1024)),
    "h200": Speeds(989e12, 4.8e12, Chip("cuda", 9, 227 * 1024)),
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least time of a backend."""

    seconds: float
    flops: float
    num_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, default="h100")
    speeds = CHIPS[parser.parse_args().chip]
    print(f"| P/R/K | products, GFLOP | FLOP a byte (ridge {speeds.ridge:.0f}) | `triton`, ms | `merge`, ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for shape in SHAPES:
        products = (1 + BACKWARD) * shape.flops(is_shared=True)
        triton, merge = bound_triton(shape, speeds), bound_merge(shape, speeds)
        print(
            f"| {shape.name} | {products / 1e9:.0f} | {products / triton.num_bytes:.0f}, "
            f"{products / merge.num_bytes:.0f} | {1e3 * triton.seconds:.3f} | {1e3 * merge.seconds:.3f} | "
            f"{merge.seconds / triton.seconds:.2f} |"
        )


def bound_triton(shape: Shape, speeds: Speeds) -> Bound:
    """Bound the three large kernels; the fourth adds little."""
    blocks = choose_blocks(shape.head_dim, torch.bfloat16, speeds.chip)
    strands = find_strands(shape.layout)
    num_tokens, width = shape.layout.num_tokens, shape.head_dim * _BYTES
    heads, groups = num_tokens * shape.num_heads * width, num_tokens * shape.num_groups * width
    kernels = (
        # Queries and results; keys and values.
        (_FORWARD, blocks.forward, 2 * heads + 2 * groups),
        # Queries, results, their gradients.
        (_QUERY_GRADIENTS, blocks.query_gradients, 4 * heads + 2 * groups),
        (_KEY_GRADIENTS, blocks.key_gradients, 2 * heads + 4 * groups),
    )
    flops = [
        2.0 * products * shape.head_dim * shape.num_heads * sum(_count_in_blocks(strand, rows) for strand in strands)
        for products, rows, _ in kernels
    ]
    num_bytes = [moved for *_, moved in kernels]
    return Bound(sum(map(speeds.seconds, flops, num_bytes)), sum(flops), sum(num_bytes))


def bound_merge(shape: Shape, speeds: Speeds) -> Bound:
    """Bound the calls, and the moves of rows between them."""
    strands = find_strands(shape.layout)
    flops = (1 + BACKWARD) * shape.flops(is_shared=True)
    num_tokens = shape.layout.num_tokens
    # A row counts once in each level above it; a range of keys once in each level.
    below = sum(strand.rows.length * len(strand.above) for strand in strands)
    above = sum(rows.length for rows in {rows for strand in strands for rows in strand.above})
    of_heads, of_groups = shape.num_heads * shape.head_dim, shape.num_groups * shape.head_dim
    in_calls = _BYTES * ((num_tokens + below) * 6 * of_heads + (num_tokens + above) * 6 * of_groups)
    between = 0
    if below:
        # Bytes of a number of a row, forward and backward: to and from float32, taken out, merged, put back.
        between += of_heads * (num_tokens * 24 + below * (36 + 30))
        between += of_groups * (num_tokens * 24 + above * (8 + 44))
    return Bound(speeds.seconds(flops, in_calls) + between / speeds.bytes, flops, in_calls + between)


def _count_in_blocks(strand: Strand, blocks: Blocks) -> int:
    """Count the pairs of whole blocks that hold any pair that is seen."""
    return sum(_count_of_block(strand, first, blocks) for first in range(0, strand.rows.length, blocks.queries))


def _count_of_block(strand: Strand, first: int, blocks: Blocks) -> int:
    last = min(first + blocks.queries, strand.rows.length)
    keys: Iterator[int] = (-(-length // blocks.keys) for length in (*(rows.length for rows in strand.above), last))
    return blocks.queries * blocks.keys * sum(keys)


if __name__ == "__main__":
    main()
