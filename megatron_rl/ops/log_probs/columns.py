"""The columns of the vocabulary that a rank holds, and the blocks in which they are processed."""

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist


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
