"""The kernels of the `triton` backend. Importing this imports Triton, and decides whether it compiles or interprets.

A program of the first and third kernel has a part of the columns of one row, and loops over it. All columns of a block
are tokens'. Sums are taken in a fixed order, without atomics: the same logits give the same bits.

Letters: N rows, C columns of a block of logits, P parts of a row's columns, R rows of a program.
"""

import triton
import triton.language as tl

# The least finite number: a maximum of no columns, as in `statistics`.
_LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit(do_not_specialize=["temperature"])
def statistics_kernel(
    logits_NC: tl.tensor,
    maxima_PN: tl.tensor,
    sums_PN: tl.tensor,
    moments_PN: tl.tensor,
    num_columns: tl.tensor,
    part_columns: tl.tensor,
    temperature: tl.tensor,
    IS_SCALED: tl.constexpr,
    WITH_MOMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Store the maximum of each part of each row, and its sums of exp(x - max) and (x - max) exp(x - max)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_C = logits_NC + row * num_columns
    end = tl.minimum((part + 1) * part_columns, num_columns)
    greatest = tl.full([], _LEAST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    moment = tl.full([], 0.0, tl.float32)
    for first in range(part * part_columns, end, COLUMNS):
        columns_C = first + tl.arange(0, COLUMNS)
        x_C = _load_scaled(row_C + columns_C, columns_C < end, temperature, IS_SCALED)
        raised = tl.maximum(greatest, tl.max(x_C, axis=0))
        change = greatest - raised
        factor = tl.exp(change)
        x_C -= raised
        exp_C = tl.exp(x_C)
        if WITH_MOMENTS:
            # After the end x is infinite and its exponential 0, whose product is not a number.
            product_C = tl.where(columns_C < end, x_C * exp_C, 0.0)
            moment = (moment + change * total) * factor + tl.sum(product_C, axis=0)
        total = total * factor + tl.sum(exp_C, axis=0)
        greatest = raised
    place = part.to(tl.int64) * tl.num_programs(0) + row
    tl.store(maxima_PN + place, greatest)
    tl.store(sums_PN + place, total)
    if WITH_MOMENTS:
        tl.store(moments_PN + place, moment)


@triton.jit(do_not_specialize=["num_rows", "num_parts", "temperature"])
def join_kernel(
    logits_NC: tl.tensor,
    targets_N: tl.tensor,
    maxima_PN: tl.tensor,
    sums_PN: tl.tensor,
    moments_PN: tl.tensor,
    max_N: tl.tensor,
    sum_N: tl.tensor,
    moment_N: tl.tensor,
    chosen_N: tl.tensor,
    num_holders_N: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_parts: tl.tensor,
    temperature: tl.tensor,
    IS_SCALED: tl.constexpr,
    WITH_MOMENTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Add the parts of a block to the rows' statistics, in the order of their columns, and the logits of targets."""
    rows_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row_R = rows_R < num_rows
    greatest_R = tl.load(max_N + rows_R, mask=is_row_R, other=0.0)
    total_R = tl.load(sum_N + rows_R, mask=is_row_R, other=0.0)
    moment_R = tl.zeros([ROWS], tl.float32)
    if WITH_MOMENTS:
        moment_R = tl.load(moment_N + rows_R, mask=is_row_R, other=0.0)
    places_R = rows_R
    for _ in range(num_parts):
        part_greatest_R = tl.load(maxima_PN + places_R, mask=is_row_R, other=0.0)
        part_total_R = tl.load(sums_PN + places_R, mask=is_row_R, other=0.0)
        raised_R = tl.maximum(greatest_R, part_greatest_R)
        change_R, part_change_R = greatest_R - raised_R, part_greatest_R - raised_R
        factor_R, part_factor_R = tl.exp(change_R), tl.exp(part_change_R)
        if WITH_MOMENTS:
            part_moment_R = tl.load(moments_PN + places_R, mask=is_row_R, other=0.0)
            moment_R = (moment_R + change_R * total_R) * factor_R
            moment_R += (part_moment_R + part_change_R * part_total_R) * part_factor_R
        total_R = total_R * factor_R + part_total_R * part_factor_R
        greatest_R = raised_R
        places_R += num_rows
    tl.store(max_N + rows_R, greatest_R, mask=is_row_R)
    tl.store(sum_N + rows_R, total_R, mask=is_row_R)
    if WITH_MOMENTS:
        tl.store(moment_N + rows_R, moment_R, mask=is_row_R)
    target_R = tl.load(targets_N + rows_R, mask=is_row_R, other=-1)
    is_here_R = (target_R >= 0) & (target_R < num_columns)
    x_R = _load_scaled(logits_NC + rows_R * num_columns + target_R, is_here_R, temperature, IS_SCALED)
    chosen_R = tl.load(chosen_N + rows_R, mask=is_row_R, other=0.0)
    num_holders_R = tl.load(num_holders_N + rows_R, mask=is_row_R, other=0.0)
    tl.store(chosen_N + rows_R, chosen_R + tl.where(is_here_R, x_R, 0.0), mask=is_row_R)
    tl.store(num_holders_N + rows_R, num_holders_R + is_here_R.to(tl.float32), mask=is_row_R)


@triton.jit(do_not_specialize=["temperature"])
def gradient_kernel(
    logits_NC: tl.tensor,
    targets_N: tl.tensor,
    max_N: tl.tensor,
    hit_N: tl.tensor,
    miss_N: tl.tensor,
    slope_N: tl.tensor,
    num_columns: tl.tensor,
    part_columns: tl.tensor,
    temperature: tl.tensor,
    IS_SCALED: tl.constexpr,
    WITH_MOMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Replace a part of a row's logits by their gradient (`statistics.GradientFactors`)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row_C = logits_NC + row * num_columns
    end = tl.minimum((part + 1) * part_columns, num_columns)
    target = tl.load(targets_N + row)
    greatest, hit, miss = tl.load(max_N + row), tl.load(hit_N + row), tl.load(miss_N + row)
    slope = tl.load(slope_N + row) if WITH_MOMENTS else 0.0
    for first in range(part * part_columns, end, COLUMNS):
        columns_C = first + tl.arange(0, COLUMNS)
        is_token_C = columns_C < end
        x_C = _load_scaled(row_C + columns_C, is_token_C, temperature, IS_SCALED) - greatest
        grad_C = tl.exp(x_C) * (miss + slope * x_C if WITH_MOMENTS else miss)
        grad_C += tl.where(columns_C == target, hit, 0.0)
        tl.store(row_C + columns_C, grad_C.to(logits_NC.dtype.element_ty), mask=is_token_C)


@triton.jit
def _load_scaled(pointers: tl.tensor, mask: tl.tensor, temperature: tl.tensor, IS_SCALED: tl.constexpr) -> tl.tensor:
    """Load logits divided by the temperature, in fp32; minus infinity where the mask is off.

    A product with 1 / temperature would round twice.
    """
    x = tl.load(pointers, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, temperature) if IS_SCALED else x
