"""Log-probs of given tokens from hidden states: the output layer and its softmax, fused.

The vocabulary may be divided over ranks. A rank processes its part in blocks of columns, and keeps a few numbers for
each row. The backward pass computes each block's logits again. Neither pass ever holds an array of all logits.

Letters: N targets, E hidden size, V this rank's columns of the vocabulary, C the columns of one block.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# A block's logits: 64 MiB in float32.
_BLOCK_ELEMENTS = 1 << 24
# With narrower blocks, most of the time is spent on adding to the hidden states' gradient.
_LEAST_BLOCK_COLUMNS = 1024


@dataclasses.dataclass(frozen=True)
class VocabularyShard:
    """The columns of the vocabulary that this rank holds."""

    first: int
    vocab_size: int
    """The number of tokens. Columns from here on are padding."""
    group: dist.ProcessGroup | None = None
    """The ranks that share the vocabulary; None if this rank holds all of it."""

    def num_real(self, num_columns: int) -> int:
        """Return the number of this rank's columns that belong to tokens; they come first."""
        return max(0, min(num_columns, self.vocab_size - self.first))

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the ranks that share the vocabulary."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor


def output_log_probs(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    targets_N: torch.Tensor,
    shard: VocabularyShard,
    temperature: float = 1.0,
    block_columns: int | None = None,
    with_entropies: bool = False,
) -> torch.Tensor:
    """Compute log softmax(hidden @ weight.T / temperature) at each row's target, in fp32, without padded columns.

    With `with_entropies`, return [N, 2]: the second column is the entropy of each row's distribution over the whole
    vocabulary.

    The gradient of the hidden states comes from this rank's columns alone, and must be summed over the ranks. A target
    outside the vocabulary gives NaN, since it has no probability. `block_columns` is for tests, and changes results
    only by rounding.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be above 0")
    if block_columns is None:
        # Multiples of 128 suit matrix units.
        block_columns = max(_LEAST_BLOCK_COLUMNS, _BLOCK_ELEMENTS // max(1, len(hidden_NE)) // 128 * 128)
    columns = _Columns(shard, targets_N - shard.first, shard.num_real(len(weight_VE)), block_columns, temperature)
    result: torch.Tensor = _LogProbs.apply(hidden_NE, weight_VE, columns, with_entropies)
    return result


@dataclasses.dataclass(frozen=True)
class _Columns:
    """This rank's columns of tokens, block by block. Columns of padding are never computed."""

    shard: VocabularyShard
    local_targets_N: torch.Tensor
    """Targets, counted from this rank's first column. Targets that other ranks hold lie outside its columns."""
    num_real: int
    block_columns: int
    temperature: float

    def blocks(self) -> Iterator[slice]:
        for first in range(0, self.num_real, self.block_columns):
            yield slice(first, min(first + self.block_columns, self.num_real))

    def scaled_logits(self, hidden_NE: torch.Tensor, weight_VE: torch.Tensor, block: slice) -> torch.Tensor:
        """Compute a block's logits, divided by the temperature, in at least 32 bits. The caller may overwrite them."""
        logits_NC = torch.nn.functional.linear(hidden_NE, weight_VE[block])
        return logits_NC.to(_statistics_dtype(hidden_NE)).div_(self.temperature)

    def targets_in(self, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's target as a column of the block, [N, 1], and whether the block has it; 0 if not."""
        is_here_N1 = ((self.local_targets_N >= block.start) & (self.local_targets_N < block.stop))[:, None]
        return (self.local_targets_N[:, None] - block.start).where(is_here_N1, 0), is_here_N1


class _Statistics:
    """Statistics of the columns that were added so far, each with one number for each row."""

    def __init__(self, like_NE: torch.Tensor, with_entropies: bool) -> None:
        dtype = _statistics_dtype(like_NE)
        # Finite, so that a rank without columns of tokens contributes zeros and not NaN.
        self.max_N = like_NE.new_full((len(like_NE),), torch.finfo(dtype).min, dtype=dtype)
        # The sum over columns of exp(logit - max).
        self.sum_N = torch.zeros_like(self.max_N)
        self.chosen_N = torch.zeros_like(self.max_N)
        self.num_holders_N = torch.zeros_like(self.max_N)
        # The sum over columns of (logit - max) exp(logit - max); None without entropies.
        self.moment_N = torch.zeros_like(self.max_N) if with_entropies else None

    def add(self, scaled_NC: torch.Tensor, columns_N1: torch.Tensor, is_here_N1: torch.Tensor) -> None:
        """Add a block's columns, and overwrite the block."""
        self.chosen_N += scaled_NC.gather(1, columns_N1).masked_fill(~is_here_N1, 0.0)[:, 0]
        self.num_holders_N += is_here_N1[:, 0]
        self._raise_max(torch.maximum(self.max_N, scaled_NC.amax(dim=1)))
        scaled_NC.sub_(self.max_N[:, None])
        if self.moment_N is None:
            self.sum_N += scaled_NC.exp_().sum(dim=1)
            return
        parts_NC = scaled_NC.exp()
        self.sum_N += parts_NC.sum(dim=1)
        self.moment_N += parts_NC.mul_(scaled_NC).sum(dim=1)

    def reduce(self, shard: VocabularyShard) -> None:
        """Add the columns of all ranks, with two reductions for any number of blocks."""
        self._raise_max(shard.all_reduce(self.max_N.clone(), dist.ReduceOp.MAX))
        # A target that no rank holds would look like the most likely token. So the ranks that hold it are counted.
        moments = [] if self.moment_N is None else [self.moment_N]
        sums = torch.stack((self.sum_N, self.chosen_N, self.num_holders_N, *moments))
        self.sum_N, self.chosen_N, self.num_holders_N, *moments = shard.all_reduce(sums).unbind()
        self.moment_N = moments[0] if moments else None

    def log_probs(self) -> torch.Tensor:
        log_probs_N = (self.chosen_N - self.max_N) - self.sum_N.log()
        return log_probs_N.masked_fill(self.num_holders_N == 0, float("nan"))

    def entropies(self) -> torch.Tensor | None:
        return None if self.moment_N is None else self.sum_N.log() - self.moment_N / self.sum_N

    def _raise_max(self, max_N: torch.Tensor) -> None:
        change_N = self.max_N - max_N
        factor_N = change_N.exp()
        if self.moment_N is not None:
            self.moment_N = (self.moment_N + change_N * self.sum_N) * factor_N
        self.sum_N = self.sum_N * factor_N
        self.max_N = max_N


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NE: torch.Tensor, weight_VE: torch.Tensor, columns: _Columns, with_entropies: bool
    ) -> torch.Tensor:
        statistics = _Statistics(hidden_NE, with_entropies)
        for block in columns.blocks():
            statistics.add(columns.scaled_logits(hidden_NE, weight_VE, block), *columns.targets_in(block))
        statistics.reduce(columns.shard)
        entropies_N = statistics.entropies()
        ctx.save_for_backward(hidden_NE, weight_VE, statistics.max_N, statistics.sum_N, entropies_N)
        ctx.columns = columns
        log_probs_N = statistics.log_probs()
        return log_probs_N if entropies_N is None else torch.stack((log_probs_N, entropies_N), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Compute gradients in blocks of columns. Each block gives the whole gradient of its rows of the weight.

        That gradient is written once, in the weight's dtype. Blocks of targets would need a sum of the weight's size in
        float32. Only the gradient of the hidden states, which is much smaller, is summed over blocks in float32.
        """
        hidden_NE, weight_VE, max_N, sum_N, entropies_N = ctx.saved_tensors
        columns = ctx.columns
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_NE = torch.zeros_like(hidden_NE, dtype=_statistics_dtype(hidden_NE)) if needs_hidden else None
        grad_weight_VE = torch.empty_like(weight_VE) if needs_weight else None
        grad = grad / columns.temperature
        hit_N = grad if entropies_N is None else grad[:, 0]
        miss_N, slope_N = -hit_N / sum_N, None
        if entropies_N is not None:
            # The gradient of an entropy is, for each logit, minus its probability times its log-prob and the entropy.
            slope_N = -grad[:, 1] / sum_N
            miss_N = miss_N + slope_N * (entropies_N - sum_N.log())
        for block in columns.blocks():
            grad_NC = columns.scaled_logits(hidden_NE, weight_VE, block)
            grad_NC.sub_(max_N[:, None])
            if slope_N is None:
                grad_NC.exp_().mul_(miss_N[:, None])
            else:
                grad_NC = (grad_NC * slope_N[:, None]).add_(miss_N[:, None]).mul_(grad_NC.exp_())
            columns_N1, is_here_N1 = columns.targets_in(block)
            grad_NC.scatter_add_(1, columns_N1, hit_N[:, None].where(is_here_N1, 0.0))
            grad_NC = grad_NC.to(weight_VE.dtype)
            if grad_hidden_NE is not None:
                grad_hidden_NE += grad_NC @ weight_VE[block]
            if grad_weight_VE is not None:
                torch.mm(grad_NC.t(), hidden_NE, out=grad_weight_VE[block])
            # Otherwise the gradient would stay in memory while the next block is computed.
            del grad_NC
        if grad_weight_VE is not None:
            grad_weight_VE[columns.num_real :] = 0
        return grad_hidden_NE.to(hidden_NE.dtype) if grad_hidden_NE is not None else None, grad_weight_VE, None, None


def _statistics_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
