"""Log-probabilities of given tokens under logits whose vocabulary is divided over ranks.

Letters: N targets, V this rank's columns of the vocabulary.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class VocabularyShard:
    """Which columns of the vocabulary this rank holds."""

    first: int
    vocab_size: int
    """The real size: columns from here on are padding and belong to no token."""
    group: dist.ProcessGroup | None = None
    """The ranks that hold the other columns; None when there are none."""

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce in place over the ranks that share the vocabulary."""
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor


def vocabulary_parallel_log_probs(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, shard: VocabularyShard, temperature: float = 1.0
) -> torch.Tensor:
    """log softmax(logits / temperature) at each row's target, fp32; padded columns count for nothing.

    A target outside the vocabulary gives NaN: what is not a token has no probability.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: it must be above 0")
    return _LogProbs.apply(logits_NV, targets_N, shard, temperature)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, targets_N: torch.Tensor, shard: VocabularyShard, temperature: float
    ) -> torch.Tensor:
        scaled_NV = logits_NV.float() / temperature
        num_real = max(0, min(scaled_NV.shape[1], shard.vocab_size - shard.first))
        scaled_NV[:, num_real:] = float("-inf")
        max_N = shard.all_reduce(scaled_NV.amax(dim=1), dist.ReduceOp.MAX)
        scaled_NV -= max_N[:, None]
        local_N = targets_N - shard.first
        is_here_N = (local_N >= 0) & (local_N < num_real)
        local_N = local_N.clamp(0, scaled_NV.shape[1] - 1)
        chosen_N = scaled_NV.gather(1, local_N[:, None])[:, 0].masked_fill(~is_here_N, 0.0)
        softmax_NV = scaled_NV.exp_()
        # A target that no rank holds would look like the likeliest token, so the ranks that hold it are counted.
        sum_N, chosen_N, holders_N = shard.all_reduce(torch.stack((softmax_NV.sum(dim=1), chosen_N, is_here_N.float())))
        softmax_NV /= sum_N[:, None]
        ctx.save_for_backward(softmax_NV, local_N, is_here_N)
        ctx.temperature, ctx.logits_dtype = temperature, logits_NV.dtype
        return (chosen_N - sum_N.log()).masked_fill(holders_N == 0, float("nan"))

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        softmax_NV, local_N, is_here_N = ctx.saved_tensors
        grad_NV = softmax_NV * (-grad_N / ctx.temperature)[:, None]
        hit_N = torch.where(is_here_N, grad_N / ctx.temperature, 0.0)
        grad_NV.scatter_add_(1, local_N[:, None], hit_N[:, None])
        return grad_NV.to(ctx.logits_dtype), None, None, None
