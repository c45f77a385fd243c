"""Blocks of logits in torch's own operations, each of which reads and writes the block."""

import torch

from megatron_rl.ops.backends import refuse_nothing
from megatron_rl.ops.log_probs.function import GradientFactors, RowStatistics, TargetRows, find_statistics_dtype

# A block's logits: 64 MiB in float32.
_BLOCK_ELEMENTS = 1 << 24
# With narrower blocks, most of the time is spent on adding to the hidden states' gradient.
_LEAST_BLOCK_COLUMNS = 1024
refusal = refuse_nothing


def choose_block_columns(num_rows: int, dtype: torch.dtype) -> int:
    """Choose a multiple of 128, which suits matrix units."""
    return max(_LEAST_BLOCK_COLUMNS, _BLOCK_ELEMENTS // max(1, num_rows) // 128 * 128)


def add_block(statistics: RowStatistics, rows: TargetRows, targets_N: torch.Tensor, temperature: float) -> None:
    """Add the columns of a block of the weight. Targets outside the block are those of other blocks."""
    add_logits(statistics, scale_logits(rows.hidden_NE, rows.weight_VE, temperature), targets_N)


def add_logits(statistics: RowStatistics, scaled_NC: torch.Tensor, targets_N: torch.Tensor) -> None:
    """Add the columns of a block, of which these are the logits; they are overwritten."""
    columns_N1, is_here_N1 = find_targets(targets_N, scaled_NC.shape[1])
    statistics.chosen_N += scaled_NC.gather(1, columns_N1).masked_fill(~is_here_N1, 0.0)[:, 0]
    statistics.num_holders_N += is_here_N1[:, 0]
    statistics.raise_max(torch.maximum(statistics.max_N, scaled_NC.amax(dim=1)))
    scaled_NC.sub_(statistics.max_N[:, None])
    if statistics.moment_N is None:
        statistics.sum_N += scaled_NC.exp_().sum(dim=1)
        return
    parts_NC = scaled_NC.exp()
    statistics.sum_N += parts_NC.sum(dim=1)
    statistics.moment_N += parts_NC.mul_(scaled_NC).sum(dim=1)


def differentiate_block(
    factors: GradientFactors, rows: TargetRows, targets_N: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Compute the gradient of a block's logits, in the weight's dtype."""
    scaled_NC = scale_logits(rows.hidden_NE, rows.weight_VE, temperature)
    return differentiate_logits(factors, scaled_NC.sub_(factors.max_N[:, None]), targets_N).to(rows.weight_VE.dtype)


def differentiate_logits(factors: GradientFactors, grad_NC: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of a block's logits from these less their rows' maxima, which are overwritten."""
    if factors.slope_N is None:
        grad_NC.exp_().mul_(factors.miss_N[:, None])
    else:
        grad_NC = (grad_NC * factors.slope_N[:, None]).add_(factors.miss_N[:, None]).mul_(grad_NC.exp_())
    columns_N1, is_here_N1 = find_targets(targets_N, grad_NC.shape[1])
    return grad_NC.scatter_add_(1, columns_N1, factors.hit_N[:, None].where(is_here_N1, 0.0))


def add_product(sum_NE: torch.Tensor, grad_NC: torch.Tensor, weight_CE: torch.Tensor) -> None:
    """Add grad @ weight to the sum. The product is rounded to the weight's dtype first."""
    sum_NE += grad_NC @ weight_CE


def scale_logits(hidden_NE: torch.Tensor, weight_CE: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute logits, divided by the temperature, in at least 32 bits. The caller may overwrite them."""
    logits_NC = torch.nn.functional.linear(hidden_NE, weight_CE)
    return logits_NC.to(find_statistics_dtype(hidden_NE)).div_(temperature)


def find_targets(targets_N: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's target as a column of the block, [N, 1], and whether the block has it; 0 if not."""
    is_here_N1 = ((targets_N >= 0) & (targets_N < num_columns))[:, None]
    return targets_N[:, None].where(is_here_N1, 0), is_here_N1
