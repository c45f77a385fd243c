"""The output layer and its softmax as one operation of autograd, in blocks of columns of the vocabulary."""

import dataclasses
from typing import Any, Protocol

import torch

from megatron_rl.ops.backends import Refuse, refuse_nothing
from megatron_rl.ops.log_probs.statistics import Columns, GradientFactors, RowStatistics, find_statistics_dtype
from megatron_rl.ops.main_gradients import add_product, find_main_grad, mark_as_added


class AddBlock(Protocol):
    def __call__(
        self,
        statistics: RowStatistics,
        hidden_NE: torch.Tensor,
        weight_CE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> None:
        """Add the columns of a block of the weight. Targets outside the block are those of other blocks."""
        ...


class DifferentiateBlock(Protocol):
    def __call__(
        self,
        factors: GradientFactors,
        hidden_NE: torch.Tensor,
        weight_CE: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """Compute the gradient of a block's logits, in the weight's dtype."""
        ...


class AddProduct(Protocol):
    def __call__(self, sum_NE: torch.Tensor, grad_NC: torch.Tensor, weight_CE: torch.Tensor, /) -> None:
        """Add grad @ weight to the sum, which has the dtype of statistics."""
        ...


class ChooseBlockColumns(Protocol):
    def __call__(self, num_rows: int, dtype: torch.dtype) -> int:
        """Choose the columns of a block of logits in this dtype."""
        ...


@dataclasses.dataclass(frozen=True)
class BlockBackend:
    """One implementation of what is computed of each block."""

    choose_block_columns: ChooseBlockColumns
    add_block: AddBlock
    differentiate_block: DifferentiateBlock
    add_product: AddProduct
    refusal: Refuse = refuse_nothing


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
        statistics = RowStatistics(hidden_NE, with_entropies)
        for block, targets_N in columns.blocks():
            backend.add_block(statistics, hidden_NE, weight_VE[block], targets_N, temperature)
        statistics.reduce(columns.shard)
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
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_NE = torch.zeros_like(hidden_NE, dtype=find_statistics_dtype(hidden_NE)) if needs_hidden else None
        main_grad_VE = None if ctx.parameter is None or not needs_weight else find_main_grad(ctx.parameter)
        grad_weight_VE = torch.empty_like(weight_VE) if needs_weight and main_grad_VE is None else None
        factors = GradientFactors.of(grad, ctx.temperature, max_N, sum_N, entropies_N)
        for block, targets_N in ctx.columns.blocks():
            weight_CE = weight_VE[block]
            grad_NC = ctx.backend.differentiate_block(factors, hidden_NE, weight_CE, targets_N, ctx.temperature)
            if grad_hidden_NE is not None:
                ctx.backend.add_product(grad_hidden_NE, grad_NC, weight_CE)
            if main_grad_VE is not None:
                add_product(main_grad_VE[block], grad_NC.t(), hidden_NE)
            elif grad_weight_VE is not None:
                torch.mm(grad_NC.t(), hidden_NE, out=grad_weight_VE[block])
            # Otherwise the gradient would stay in memory while the next block is computed.
            del grad_NC
        if main_grad_VE is not None:
            grad_weight_VE = mark_as_added(ctx.parameter)
        elif grad_weight_VE is not None:
            grad_weight_VE[ctx.columns.num_real :] = 0
        grad_hidden_NE = None if grad_hidden_NE is None else grad_hidden_NE.to(hidden_NE.dtype)
        return grad_hidden_NE, grad_weight_VE, None, None, None, None, None
