"""Blocks of logits in Triton kernels: one reads a block once for its statistics, one replaces it by its gradient.

Logits stay in the dtype of hidden states and weight, and nothing else has a block's size. So blocks are wide, and there
are few of them.
"""

import torch

from megatron_rl.ops import main_gradients
from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.log_probs.function import GradientFactors, RowStatistics, TargetRows
from megatron_rl.ops.triton_support import launch, refuse_triton

MOST_BLOCK_BYTES = 1 << 29
# With narrower blocks, most of the time is spent on adding to the hidden states' gradient.
LEAST_BLOCK_COLUMNS = 1024
# The columns of a row that a program reads at once, and its warps: 16 columns a thread.
COLUMNS, NUM_WARPS = 4096, 8
# The rows of a program that joins parts.
JOINED_ROWS = 128
# With fewer rows a row is divided over programs. The number is the same on every device, and so are the sums.
_FEW_PROGRAMS = 1024
add_product = main_gradients.add_product


def choose_block_columns(num_rows: int, dtype: torch.dtype) -> int:
    """Choose a multiple of 128, which suits matrix units."""
    return max(LEAST_BLOCK_COLUMNS, MOST_BLOCK_BYTES // dtype.itemsize // max(1, num_rows) // 128 * 128)


def divide_row(num_rows: int, num_columns: int) -> tuple[int, int]:
    """Return the number of parts of a row, none of them empty, and the columns of a part, a multiple of COLUMNS."""
    num_steps = -(-num_columns // COLUMNS)
    steps = -(-num_steps // -(-_FEW_PROGRAMS // num_rows))
    return -(-num_steps // steps), steps * COLUMNS


def add_block(statistics: RowStatistics, rows: TargetRows, targets_N: torch.Tensor, temperature: float) -> None:
    """Add the columns of a block of the weight. Targets outside the block are those of other blocks."""
    from megatron_rl.ops.log_probs.triton_kernels import join_kernel, statistics_kernel

    logits_NC = torch.nn.functional.linear(rows.hidden_NE, rows.weight_VE)
    num_rows, num_columns = logits_NC.shape
    if num_rows == 0:
        return
    num_parts, part_columns = divide_row(num_rows, num_columns)
    with_moments = statistics.moment_N is not None
    # A kernel without moments neither reads nor writes their place.
    moment_N = statistics.sum_N if statistics.moment_N is None else statistics.moment_N
    parts_3PN = statistics.max_N.new_empty((3 if with_moments else 2, num_parts, num_rows))
    parts = [parts_3PN[0], parts_3PN[1], parts_3PN[-1]]
    constants = {"IS_SCALED": temperature != 1.0, "WITH_MOMENTS": with_moments}
    launch(
        statistics_kernel, (num_rows, num_parts), logits_NC, *parts, num_columns, part_columns, temperature,
        **constants, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    launch(
        join_kernel, (-(-num_rows // JOINED_ROWS),), logits_NC, targets_N, *parts,
        statistics.max_N, statistics.sum_N, moment_N, statistics.chosen_N, statistics.num_holders_N,
        num_rows, num_columns, num_parts, temperature, **constants, ROWS=JOINED_ROWS,
    )  # fmt: skip


def differentiate_block(
    factors: GradientFactors, rows: TargetRows, targets_N: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Compute the gradient of a block's logits, in the weight's dtype."""
    from megatron_rl.ops.log_probs.triton_kernels import gradient_kernel

    logits_NC = torch.nn.functional.linear(rows.hidden_NE, rows.weight_VE)
    num_rows, num_columns = logits_NC.shape
    if num_rows == 0:
        return logits_NC
    num_parts, part_columns = divide_row(num_rows, num_columns)
    hit_N, miss_N, slope_N = (
        None if factor_N is None else factor_N.contiguous()
        for factor_N in (factors.hit_N, factors.miss_N, factors.slope_N)
    )
    launch(
        gradient_kernel, (num_rows, num_parts),
        logits_NC, targets_N, factors.max_N, hit_N, miss_N, miss_N if slope_N is None else slope_N,
        num_columns, part_columns, temperature,
        IS_SCALED=temperature != 1.0, WITH_MOMENTS=slope_N is not None, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return logits_NC


def refusal(conditions: Conditions) -> str | None:
    """Refuse what `refuse_triton` does."""
    return refuse_triton(conditions.device, conditions.dtype)
