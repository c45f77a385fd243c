"""The output layer and its softmax as one operation of autograd, in blocks of columns of the vocabulary.

Each row has a few numbers, `RowStatistics`, of which its softmax and its gradient are made.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rl.ops.backends import HasRefusal
from megatron_rl.ops.main_gradients import add_product, find_main_grad, mark_as_added


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


@dataclasses.dataclass(frozen=True)
class TargetRows:
    """The rows of a model that predict targets, and this rank's part of its output layer."""

    hidden_NE: torch.Tensor
    weight_VE: torch.Tensor

    def cut(self, columns: slice) -> "TargetRows":
        return TargetRows(self.hidden_NE, self.weight_VE[columns])


@dataclasses.dataclass(frozen=True)
class Columns:
    """This rank's columns of tokens, block by block. Columns of padding are never computed."""

    shard: VocabularyShard
    local_targets_N: torch.Tensor
    """Targets, counted from this rank's first column. Targets that other ranks hold lie outside its columns."""
    num_real: int
    block_columns: int

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each block with the targets, counted from the block's first column."""
        for first in range(0, self.num_real, self.block_columns):
            yield slice(first, min(first + self.block_columns, self.num_real)), self.local_targets_N - first


class RowStatistics:
    """RowStatistics of the columns that were added so far, each with one number for each row."""

    def __init__(self, like_NE: torch.Tensor, with_entropies: bool) -> None:
        dtype = find_statistics_dtype(like_NE)
        # Finite, so that a rank without columns of tokens contributes zeros and not NaN.
        self.max_N = like_NE.new_full((len(like_NE),), torch.finfo(dtype).min, dtype=dtype)
        # The sum over columns of exp(logit - max).
        self.sum_N = torch.zeros_like(self.max_N)
        self.chosen_N = torch.zeros_like(self.max_N)
        self.num_holders_N = torch.zeros_like(self.max_N)
        # The sum over columns of (logit - max) exp(logit - max); None without entropies.
        self.moment_N = torch.zeros_like(self.max_N) if with_entropies else None

    def raise_max(self, max_N: torch.Tensor) -> None:
        """Count the sums from another maximum, which must be at least the present one."""
        change_N = self.max_N - max_N
        factor_N = change_N.exp()
        if self.moment_N is not None:
            self.moment_N = (self.moment_N + change_N * self.sum_N) * factor_N
        self.sum_N = self.sum_N * factor_N
        self.max_N = max_N

    def reduce(self, shard: VocabularyShard) -> None:
        """Add the columns of all ranks, with two reductions for any number of blocks."""
        self.raise_max(shard.all_reduce(self.max_N.clone(), dist.ReduceOp.MAX))
        # A target that no rank holds would look like the most likely token. So the ranks that hold it are counted.
        moments = [] if self.moment_N is None else [self.moment_N]
        sums = torch.stack((self.sum_N, self.chosen_N, self.num_holders_N, *moments))
        self.sum_N, self.chosen_N, self.num_holders_N, *moments = shard.all_reduce(sums).unbind()
        self.moment_N = moments[0] if moments else None

    def compute_log_probs(self) -> torch.Tensor:
        log_probs_N = (self.chosen_N - self.max_N) - self.sum_N.log()
        return log_probs_N.masked_fill(self.num_holders_N == 0, float("nan"))

    def compute_entropies(self) -> torch.Tensor | None:
        return None if self.moment_N is None else self.sum_N.log() - self.moment_N / self.sum_N


@dataclasses.dataclass(frozen=True)
class GradientFactors:
    """The numbers of each row that give the gradient of its logits, before their division by the temperature:

    exp(logit - max) (miss + slope (logit - max)), and at the target that plus hit.
    """

    max_N: torch.Tensor
    hit_N: torch.Tensor
    miss_N: torch.Tensor
    slope_N: torch.Tensor | None
    """None without entropies."""

    @classmethod
    def of(
        cls,
        grad: torch.Tensor,
        temperature: float,
        max_N: torch.Tensor,
        sum_N: torch.Tensor,
        entropies_N: torch.Tensor | None,
    ) -> "GradientFactors":
        """Compute the factors from the gradient of log-probs [N], or of log-probs and entropies [N, 2]."""
        grad = grad / temperature
        if entropies_N is None:
            return cls(max_N, grad, -grad / sum_N, None)
        hit_N = grad[:, 0]
        # The gradient of an entropy is, for each logit, minus its probability times its log-prob and the entropy.
        slope_N = -grad[:, 1] / sum_N
        miss_N = -hit_N / sum_N + slope_N * (entropies_N - sum_N.log())
        return cls(max_N, hit_N, miss_N, slope_N)


def find_statistics_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of statistics: the tensor's dtype, but at least 32 bits."""
    return torch.promote_types(tensor.dtype, torch.float32)


class BlockBackend(HasRefusal, Protocol):
    """The functions of a backend: what is computed of each block."""

    def choose_block_columns(self, num_rows: int, dtype: torch.dtype) -> int:
        """Choose the columns of a block of logits in this dtype."""

    def add_block(
        self, statistics: RowStatistics, rows: TargetRows, targets_N: torch.Tensor, temperature: float
    ) -> None:
        """Add the columns of a block of the weight. Targets outside the block are those of other blocks."""

    def differentiate_block(
        self, factors: GradientFactors, rows: TargetRows, targets_N: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """Compute the gradient of a block's logits, in the weight's dtype."""

    def add_product(self, sum_NE: torch.Tensor, grad_NC: torch.Tensor, weight_CE: torch.Tensor, /) -> None:
        """Add grad @ weight to the sum, which has the dtype of statistics."""


def sum_up(
    rows: TargetRows, columns: Columns, temperature: float, with_entropies: bool, backend: BlockBackend
) -> RowStatistics:
    """Return the statistics of all ranks' columns."""
    statistics = RowStatistics(rows.hidden_NE, with_entropies)
    for block, targets_N in columns.blocks():
        backend.add_block(statistics, rows.cut(block), targets_N, temperature)
    statistics.reduce(columns.shard)
    return statistics


class LogProbs(torch.autograd.Function):
    """Log-probs of targets, [N], or those and the entropies, [N, 2]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        columns: Columns,
        temperature: float,
        with_entropies: bool,
        backend: BlockBackend,
        adds_to_main_grad: bool,
    ) -> torch.Tensor:
        statistics = sum_up(TargetRows(hidden_NE, weight_VE), columns, temperature, with_entropies, backend)
        entropies_N = statistics.compute_entropies()
        ctx.save_for_backward(hidden_NE, weight_VE, statistics.max_N, statistics.sum_N, entropies_N)
        ctx.columns, ctx.temperature, ctx.backend = columns, temperature, backend
        # The parameter itself has its main gradient.
        ctx.parameter = weight_VE if adds_to_main_grad and find_main_grad(weight_VE) is not None else None
        log_probs_N = statistics.compute_log_probs()
        return log_probs_N if entropies_N is None else torch.stack((log_probs_N, entropies_N), dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Compute gradients in blocks of columns. Each block gives the whole gradient of its rows of the weight.

        That gradient is written once, in the weight's dtype. Blocks of targets would need a sum of the weight's size in
        float32. Only the gradient of the hidden states, which is much smaller, is summed over blocks in float32. If the
        weight has a main gradient to add to, that is where its gradient is added instead.
        """
        hidden_NE, weight_VE, max_N, sum_N, entropies_N = ctx.saved_tensors
        rows = TargetRows(hidden_NE, weight_VE)
        factors = GradientFactors.of(grad, ctx.temperature, max_N, sum_N, entropies_N)

        def differentiate(block: slice, targets_N: torch.Tensor) -> torch.Tensor:
            return ctx.backend.differentiate_block(factors, rows.cut(block), targets_N, ctx.temperature)

        grads = add_block_gradients(
            hidden_NE, weight_VE, ctx.columns, ctx.parameter, ctx.needs_input_grad, differentiate, ctx.backend
        )
        return *grads, None, None, None, None, None


class AddsProducts(Protocol):
    """The part of a backend that adds the gradient of hidden states."""

    def add_product(self, sum_NE: torch.Tensor, grad_NC: torch.Tensor, weight_CE: torch.Tensor, /) -> None: ...


def add_block_gradients(
    hidden_NE: torch.Tensor,
    weight_VE: torch.Tensor,
    columns: Columns,
    parameter: torch.Tensor | None,
    needs: Sequence[bool],
    differentiate: Callable[[slice, torch.Tensor], torch.Tensor],
    backend: AddsProducts,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of hidden states and weight from the gradient of each block's logits.

    `needs` says which of the two are wanted. Only with a `parameter` is the weight's gradient added to its main one.
    """
    needs_hidden, needs_weight = needs[:2]
    grad_hidden_NE = torch.zeros_like(hidden_NE, dtype=find_statistics_dtype(hidden_NE)) if needs_hidden else None
    main_grad_VE = None if parameter is None or not needs_weight else find_main_grad(parameter)
    grad_weight_VE = torch.empty_like(weight_VE) if needs_weight and main_grad_VE is None else None
    for block, targets_N in columns.blocks():
        grad_NC = differentiate(block, targets_N)
        if grad_hidden_NE is not None:
            backend.add_product(grad_hidden_NE, grad_NC, weight_VE[block])
        if main_grad_VE is not None:
            add_product(main_grad_VE[block], grad_NC.t(), hidden_NE)
        elif grad_weight_VE is not None:
            torch.mm(grad_NC.t(), hidden_NE, out=grad_weight_VE[block])
        # Otherwise the gradient would stay in memory while the next block is computed.
        del grad_NC
    if main_grad_VE is not None:
        assert parameter is not None
        grad_weight_VE = mark_as_added(parameter)
    elif grad_weight_VE is not None:
        grad_weight_VE[columns.num_real :] = 0
    return None if grad_hidden_NE is None else grad_hidden_NE.to(hidden_NE.dtype), grad_weight_VE
