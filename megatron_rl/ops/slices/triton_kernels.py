"""The kernels over slices. Importing this imports Triton, and decides whether it compiles or interprets.

A program has some rows of one slice, and loops over their columns. `triton_tables` describes the tables. Tiles are in
the letters of `ops.slices`: R rows, C columns of a tile.
"""

import triton
import triton.language as tl

from megatron_rl.ops.slices.triton_tables import Line

_WIDTH = tl.constexpr(Line.WIDTH)
_POINTER, _ROW_STRIDE = tl.constexpr(Line.POINTER), tl.constexpr(Line.ROW_STRIDE)
_NUM_ROWS, _NUM_COLUMNS = tl.constexpr(Line.NUM_ROWS), tl.constexpr(Line.NUM_COLUMNS)
_FIRST, _SECOND, _TENSOR = tl.constexpr(Line.FIRST), tl.constexpr(Line.SECOND), tl.constexpr(Line.TENSOR)


@triton.jit
def digest_kernel(
    slices: tl.tensor,
    tasks: tl.tensor,
    column_factors: tl.tensor,
    row_factors: tl.tensor,
    other_row_factors: tl.tensor,
    sums: tl.tensor,
    column_stride: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BITS: tl.constexpr,
    NUM_BITS: tl.constexpr,
    ROWS_PER_TASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add the digest of a task's rows to the sums of its tensor: FIRST is the slice's first row, SECOND its column.

    The sums are modulo 2**64, so the order of programs cannot matter.
    """
    line, start = _find_task(slices, tasks)
    num_rows, num_columns = tl.load(line + _NUM_ROWS), tl.load(line + _NUM_COLUMNS)
    first_row, first_column = tl.load(line + _FIRST), tl.load(line + _SECOND)
    lane_R, other_lane_R = tl.zeros([ROWS], tl.int64), tl.zeros([ROWS], tl.int64)
    per_word: tl.constexpr = 64 // NUM_BITS
    for first_of_tile in range(start, tl.minimum(start + ROWS_PER_TASK, num_rows), ROWS):
        rows_R = first_of_tile + tl.arange(0, ROWS)
        is_row_R = rows_R < num_rows
        sums_RC = tl.zeros([ROWS, COLUMNS], tl.int64)
        for first in range(0, num_columns, COLUMNS):
            columns_C = first + tl.arange(0, COLUMNS)
            mask_RC = is_row_R[:, None] & (columns_C < num_columns)[None, :]
            bits_RC = _read(line, rows_R, columns_C * column_stride, mask_RC, SOURCE, TARGET, BITS, NUM_BITS)
            places_C = first_column + columns_C
            factors_C = tl.load(column_factors + places_C // per_word, mask=columns_C < num_columns, other=0)
            sums_RC += bits_RC * (factors_C << (places_C % per_word * NUM_BITS))[None, :]
        sums_R = tl.sum(sums_RC, axis=1)
        lane_R += sums_R * tl.load(row_factors + first_row + rows_R, mask=is_row_R, other=0)
        other_lane_R += sums_R * tl.load(other_row_factors + first_row + rows_R, mask=is_row_R, other=0)
    tensor_sums = sums + 2 * tl.load(line + _TENSOR)
    tl.atomic_add(tensor_sums, tl.sum(lane_R, axis=0))
    tl.atomic_add(tensor_sums + 1, tl.sum(other_lane_R, axis=0))


@triton.jit
def copy_kernel(
    slices: tl.tensor,
    tasks: tl.tensor,
    buffer: tl.tensor | None,
    column_stride: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BITS: tl.constexpr,
    NUM_BITS: tl.constexpr,
    ROWS_PER_TASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copy a task's rows to their place: FIRST is the place's address, SECOND the elements from row to row there.

    In a buffer of the target's bits, rows lie one after the other: FIRST is the number of the first element there.
    """
    line, start = _find_task(slices, tasks)
    num_rows, num_columns = tl.load(line + _NUM_ROWS), tl.load(line + _NUM_COLUMNS)
    if buffer is None:
        place, place_stride = tl.load(line + _FIRST).to(tl.pointer_type(BITS)), tl.load(line + _SECOND)
    else:
        place, place_stride = buffer + tl.load(line + _FIRST), num_columns
    for first_of_tile in range(start, tl.minimum(start + ROWS_PER_TASK, num_rows), ROWS):
        rows_R = first_of_tile + tl.arange(0, ROWS)
        for first in range(0, num_columns, COLUMNS):
            columns_C = first + tl.arange(0, COLUMNS)
            mask_RC = (rows_R < num_rows)[:, None] & (columns_C < num_columns)[None, :]
            bits_RC = _read(line, rows_R, columns_C * column_stride, mask_RC, SOURCE, TARGET, BITS, NUM_BITS)
            tl.store(place + rows_R[:, None] * place_stride + columns_C[None, :], bits_RC.to(BITS), mask=mask_RC)


@triton.jit
def _find_task(slices: tl.tensor, tasks: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return this program's line in the table of slices, and its first row of that slice."""
    task = tasks + 2 * tl.program_id(0).to(tl.int64)
    return slices + tl.load(task).to(tl.int64) * _WIDTH, tl.load(task + 1).to(tl.int64)


@triton.jit
def _read(
    line: tl.tensor,
    rows_R: tl.tensor,
    offsets_C: tl.tensor,
    mask_RC: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BITS: tl.constexpr,
    NUM_BITS: tl.constexpr,
) -> tl.tensor:
    """Read a tile, convert it to the target, and return its bits as unsigned numbers in int64."""
    pointer = tl.load(line + _POINTER)
    offsets_RC = rows_R[:, None] * tl.load(line + _ROW_STRIDE) + offsets_C[None, :]
    if SOURCE == TARGET:
        bits_RC = tl.load(pointer.to(tl.pointer_type(BITS)) + offsets_RC, mask=mask_RC, other=0)
    else:
        if tl.bfloat16 == SOURCE:
            halves_RC = tl.load(pointer.to(tl.pointer_type(tl.int16)) + offsets_RC, mask=mask_RC, other=0)
            values_RC = (halves_RC.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        else:
            values_RC = tl.load(pointer.to(tl.pointer_type(SOURCE)) + offsets_RC, mask=mask_RC, other=0.0)
            values_RC = values_RC.to(tl.float32)
        if tl.bfloat16 == TARGET:
            bits_RC = _round_to_bfloat16(values_RC)
        else:
            bits_RC = values_RC.to(TARGET).to(BITS, bitcast=True)
    if NUM_BITS < 64:
        bits_RC = bits_RC.to(tl.int64) & ((1 << NUM_BITS) - 1)
    return bits_RC


@triton.jit
def _round_to_bfloat16(values: tl.tensor) -> tl.tensor:
    """Round to the nearest, and a tie to the even one; what is not a number stays so.

    In integers, since Triton's interpreter rounds ties away from zero.
    """
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values == values, rounded, 0x7FC0)
