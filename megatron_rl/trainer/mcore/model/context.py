"""Context parallelism: the ranks of a group share the rows of a pack, and for attention its heads.

Each rank has a run of rows, in the order of ranks, and computes everything but attention for these rows alone.
Attention needs all rows. Each rank sends the other ranks their heads of its rows, attends with its own heads over the
whole pack, and sends the results back. So neither the layout of a pack nor its attention depends on the number of
ranks. Values are exchanged bit for bit, and each gradient returns to the rank that its value came from. The only sum is
over copies of a key-value head, in the order of ranks.

Letters: T tokens of the pack, P ranks of the group, R rows of each rank (T / P), H heads, D head dimension, N targets,
M targets that this rank's rows predict. C numbers of a row are those of a rank's heads.
"""

import math
from typing import Any

import torch
import torch.distributed as dist


def own_rows(num_tokens: int, group: dist.ProcessGroup) -> slice:
    """Return this rank's run of a pack's rows."""
    length, rest = divmod(num_tokens, group.size())
    if rest:
        raise ValueError(
            f"a pack of {num_tokens} tokens cannot be divided over {group.size()} context-parallel ranks: pad it to a "
            "multiple of them"
        )
    return slice(group.rank() * length, (group.rank() + 1) * length)


def exchange_rows_for_heads(
    q_RHD: torch.Tensor, k_RHD: torch.Tensor, v_RHD: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Exchange all heads of this rank's rows for this rank's heads of all rows: queries, keys and values.

    The group's size must divide the number of query heads. If there are fewer key-value heads than ranks, ranks get
    copies.
    """
    size = group.size()
    if size == 1:
        return q_RHD, k_RHD, v_RHD
    num_groups = k_RHD.shape[1]
    num_copies = math.lcm(num_groups, size) // num_groups
    tensors = (q_RHD, _repeat(k_RHD, num_copies), _repeat(v_RHD, num_copies))
    # All numbers of a rank's heads in one row, since values may have another width than keys.
    by_rank = [tensor_RHD.unflatten(1, (size, -1)).flatten(2) for tensor_RHD in tensors]
    sent_PRC = torch.cat(by_rank, dim=2).transpose(0, 1)
    received_TC = _Exchange.apply(sent_PRC, group).flatten(0, 1)
    parts = received_TC.split([part.shape[2] for part in by_rank], dim=1)
    return tuple(part_TC.unflatten(1, (-1, of.shape[2])) for part_TC, of in zip(parts, tensors, strict=True))


def exchange_rows_for_groups(mixed_RGX: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange all groups of heads of this rank's rows for this rank's groups of all rows.

    The group's size must divide their number.
    """
    if group.size() == 1:
        return mixed_RGX
    received_PRGX: torch.Tensor = _Exchange.apply(mixed_RGX.unflatten(1, (group.size(), -1)).transpose(0, 1), group)
    return received_PRGX.flatten(0, 1)


def exchange_heads_for_rows(out_THD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange this rank's heads of all rows back for all heads of this rank's rows."""
    if group.size() == 1:
        return out_THD
    received_PRHD = _Exchange.apply(out_THD.unflatten(0, (group.size(), -1)), group)
    return received_PRHD.transpose(0, 1).flatten(1, 2)


def combine_targets(
    log_probs_M: torch.Tensor, places_M: torch.Tensor, num_targets: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Combine the ranks' values for their own targets into values for all targets, the same on every rank.

    In the backward pass, a rank takes the gradients of its own targets. Every rank must compute the same loss.
    """
    return _AllTargets.apply(log_probs_M, places_M, num_targets, group)


def _repeat(tensor_RHD: torch.Tensor, num_copies: int) -> torch.Tensor:
    """Repeat each head, copy after copy; its gradient is the sum over the copies."""
    if num_copies == 1:
        return tensor_RHD
    return tensor_RHD.unsqueeze(2).expand(-1, -1, num_copies, -1).flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Sends part p to rank p, and puts the part from rank p in its place. This function is its own inverse."""

    @staticmethod
    def forward(ctx: Any, parts_PRHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _send_parts(parts_PRHD, group)

    @staticmethod
    def backward(ctx: Any, grad_PRHD: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _send_parts(grad_PRHD, ctx.group), None


def _send_parts(parts_PRHD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent_PRHD = parts_PRHD.contiguous()
    received_PRHD = torch.empty_like(sent_PRHD)
    dist.all_to_all_single(received_PRHD, sent_PRHD, group=group)
    return received_PRHD


class _AllTargets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, log_probs_M: torch.Tensor, places_M: torch.Tensor, num_targets: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(places_M)
        whole_N = log_probs_M.new_zeros(num_targets, *log_probs_M.shape[1:]).index_copy_(0, places_M, log_probs_M)
        # One rank has the value of a target, and the other ranks have zero, so the sum is exact.
        dist.all_reduce(whole_N, group=group)
        return whole_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (places_M,) = ctx.saved_tensors
        return grad_N.index_select(0, places_M), None, None, None
