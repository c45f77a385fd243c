"""The parts of a backend of the output layer: what it computes of a block of logits."""

import dataclasses
from typing import Protocol

import torch

from megatron_rl.ops.backends import Refuse, refuse_nothing
from megatron_rl.ops.log_probs.statistics import GradientFactors, RowStatistics


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
