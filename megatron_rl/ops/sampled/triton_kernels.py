"""The kernel that scores a chosen column. Importing this imports Triton, and decides whether it compiles or interprets.

A program has a row. Each of its lanes keeps the largest number that it has read, a sum of exponents relative to it, and
a count; the lanes are joined at the end. So no lane waits for another in the loop, and sums have a fixed order.
"""

import triton
import triton.language as tl

NUM_COLUMNS, NUM_WARPS = 4096, 8
"""The columns that a program reads at a time, and its warps."""
# Finite, so that no lane subtracts infinities before it has read a number.
_LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def score_kernel(
    logits: tl.tensor,
    row_stride: tl.tensor,
    chosen: tl.tensor,
    log_probs: tl.tensor,
    ranks: tl.tensor,
    num_columns: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the log-prob of a row's chosen column, and count the columns that are at least as large."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    of_chosen = tl.load(line + tl.load(chosen + row)).to(tl.float32)
    largest_C = tl.full([COLUMNS], _LEAST, tl.float32)
    sum_C = tl.zeros([COLUMNS], tl.float32)
    count_C = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_columns, COLUMNS):
        columns_C = first + tl.arange(0, COLUMNS)
        is_column_C = columns_C < num_columns
        values_C = tl.load(line + columns_C, mask=is_column_C, other=float("-inf")).to(tl.float32)
        above_C = values_C - largest_C
        # The smaller of the two exponents, relative to the larger one; infinitely far below it is 0.
        factor_C = tl.exp(-tl.abs(above_C))
        sum_C = tl.where(above_C > 0, sum_C * factor_C + 1.0, sum_C + factor_C)
        largest_C = tl.maximum(largest_C, values_C)
        count_C += ((values_C >= of_chosen) & is_column_C).to(tl.int32)
    largest = tl.max(largest_C, axis=0)
    total = tl.sum(sum_C * tl.exp(largest_C - largest), axis=0)
    tl.store(log_probs + row, of_chosen - largest - tl.log(total))
    tl.store(ranks + row, tl.sum(count_C, axis=0).to(tl.int64))
