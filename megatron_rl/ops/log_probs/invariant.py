"""Blocks of logits whose numbers depend on their own row alone, to the last bit; engines compute log-probs by them."""

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.invariant.rows import add_in_pairs, multiply
from megatron_rl.ops.log_probs import plain
from megatron_rl.ops.log_probs.function import RowStatistics, TargetRows

BLOCK_COLUMNS = 4096
differentiate_block, add_product = plain.differentiate_block, plain.add_product


def list_widths(num_columns: int) -> list[int]:
    """List the different widths of the blocks of a vocabulary."""
    return sorted({min(BLOCK_COLUMNS, num_columns), num_columns % BLOCK_COLUMNS or BLOCK_COLUMNS})


def add_block(statistics: RowStatistics, rows: TargetRows, targets_N: torch.Tensor, temperature: float) -> None:
    """Add the columns of a block of the weight. Targets outside the block are those of other blocks."""
    scaled_NC = multiply(rows.hidden_NE, rows.weight_VE).float().div_(temperature)
    columns_N1, is_here_N1 = plain.find_targets(targets_N, len(rows.weight_VE))
    statistics.chosen_N += scaled_NC.gather(1, columns_N1).masked_fill(~is_here_N1, 0.0)[:, 0]
    statistics.num_holders_N += is_here_N1[:, 0]
    _add_logits(statistics, scaled_NC)


def multiply_in_blocks(hidden_NE: torch.Tensor, weight_VE: torch.Tensor) -> torch.Tensor:
    """Compute the logits of all columns, in the products of `add_block`."""
    blocks = [multiply(hidden_NE, weight_CE) for weight_CE in weight_VE.split(BLOCK_COLUMNS)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)


def log_softmax(scaled_NV: torch.Tensor) -> torch.Tensor:
    """Compute the log-probs of all columns, in the sums of `add_block`, from logits in fp32."""
    statistics = RowStatistics(scaled_NV, with_entropies=False)
    for scaled_NC in scaled_NV.split(BLOCK_COLUMNS, dim=1):
        _add_logits(statistics, scaled_NC)
    return (scaled_NV - statistics.max_N[:, None]) - statistics.sum_N.log()[:, None]


def _add_logits(statistics: RowStatistics, scaled_NC: torch.Tensor) -> None:
    statistics.raise_max(torch.maximum(statistics.max_N, scaled_NC.amax(dim=1)))
    below_NC = scaled_NC - statistics.max_N[:, None]
    shares_NC = below_NC.exp()
    statistics.sum_N += add_in_pairs(shares_NC)
    if statistics.moment_N is not None:
        statistics.moment_N += add_in_pairs(shares_NC * below_NC)


def choose_block_columns(num_rows: int, dtype: torch.dtype) -> int:
    return BLOCK_COLUMNS


def refusal(conditions: Conditions) -> str | None:
    is_known = conditions.device == "cpu" and conditions.dtype in (torch.float32, torch.bfloat16)
    return None if is_known else "it is for a CPU, in float32 or bfloat16"
