"""The divergence of one distribution over the vocabulary from another one, each made of hidden states.

Both vocabularies are divided over ranks alike, and computed in the same blocks of columns. Neither pass ever holds an
array of all logits. One pass over the blocks finds the normalizers of both distributions and, with `top_k`, the least
of the teacher's likeliest logits. Another one adds up the divergence. The backward pass computes each block again.

For a divergence D of probabilities p and q, the gradient of a logit of p is p g - p S. Here g is the derivative of D by
p, and S the sum of p g over the vocabulary. So each kind of divergence is a term of D, and p g.

Letters: N rows, E and F the two hidden sizes, V this rank's columns of the vocabulary, C the columns of one block.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.ops.log_probs import plain
from megatron_rl.ops.log_probs.function import (
    Columns,
    RowStatistics,
    TargetRows,
    VocabularyShard,
    add_block_gradients,
)
from megatron_rl.ops.main_gradients import find_main_grad
from megatron_rl.types import Divergence


def _reverse(log_p: torch.Tensor, log_q: torch.Tensor, mixture: float) -> tuple[torch.Tensor, torch.Tensor]:
    value = log_p.exp() * (log_p - log_q)
    return value, value


def _forward(log_p: torch.Tensor, log_q: torch.Tensor, mixture: float) -> tuple[torch.Tensor, torch.Tensor]:
    q = log_q.exp()
    return q * (log_q - log_p), -q


def _jsd(log_p: torch.Tensor, log_q: torch.Tensor, mixture: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_m = torch.logaddexp(log_p + math.log1p(-mixture), log_q + math.log(mixture))
    slope = (1 - mixture) * log_p.exp() * (log_p - log_m)
    return slope + mixture * log_q.exp() * (log_q - log_m), slope


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]] = {
    "reverse": _reverse,
    "forward": _forward,
    "jsd": _jsd,
}
"""By a divergence's kind, the function from log p, log q and the mixture to the terms of D, and p g."""


def output_divergence(
    policy: TargetRows,
    teacher: TargetRows,
    shard: VocabularyShard,
    temperature: float,
    divergence: Divergence,
    block_columns: int | None = None,
    adds_to_main_grad: bool = False,
) -> torch.Tensor:
    """Compute the divergence of each row, in fp32; only the policy gets gradients.

    Sum them over ranks, as with `output_log_probs`, which has the same `block_columns` and `adds_to_main_grad`.
    """
    if block_columns is None:
        block_columns = plain.choose_block_columns(len(policy.hidden_NE), policy.hidden_NE.dtype)
    # No column is a target.
    targets_N = torch.full((len(policy.hidden_NE),), -1, device=policy.hidden_NE.device)
    columns = Columns(shard, targets_N, shard.num_real(len(policy.weight_VE)), block_columns)
    result: torch.Tensor = _Diverge.apply(
        policy.hidden_NE, policy.weight_VE, teacher, columns, temperature, divergence, adds_to_main_grad
    )
    return result


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Both distributions of each row."""

    policy: TargetRows
    teacher: TargetRows
    log_sums_2N: tuple[torch.Tensor, torch.Tensor]
    """Two numbers to take from logits to make log-probs: the largest one, and the logarithm of the sum beside it.

    One after the other: their sum would round away what differs between two distributions that are nearly alike.
    """
    least_N: torch.Tensor | None
    """The least of the teacher's log-probs that count singly."""
    temperature: float

    def compute_block(self, block: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return a block's log-probs under the policy and the teacher, and where others count together."""
        log_p_NC, log_q_NC = (
            _compute_log_probs(rows, block, self.temperature, log_sum_2N)
            for rows, log_sum_2N in zip((self.policy, self.teacher), self.log_sums_2N, strict=True)
        )
        return log_p_NC, log_q_NC, None if self.least_N is None else log_q_NC < self.least_N[:, None]


class _Diverge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        teacher: TargetRows,
        columns: Columns,
        temperature: float,
        divergence: Divergence,
        adds_to_main_grad: bool,
    ) -> torch.Tensor:
        policy = TargetRows(hidden_NE, weight_VE)
        log_sums_2N = (_sum_up(policy, columns, temperature), _sum_up(teacher, columns, temperature))
        least_N = None
        if divergence.top_k is not None:
            least_N = _find_least(teacher, columns, temperature, divergence.top_k, log_sums_2N[1])
        pair = _Pair(policy, teacher, log_sums_2N, least_N, temperature)
        # Sums of D, of p g, of p and q where tokens count singly, and of p and q where they count together.
        sums_6N = torch.zeros(6, len(hidden_NE), dtype=log_sums_2N[0].dtype, device=hidden_NE.device)
        for block, _ in columns.blocks():
            log_p_NC, log_q_NC, is_other_NC = pair.compute_block(block)
            parts = [*KINDS[divergence.kind](log_p_NC, log_q_NC, divergence.mixture)]
            if is_other_NC is not None:
                p_NC, q_NC = log_p_NC.exp_(), log_q_NC.exp_()
                parts = [part.masked_fill(is_other_NC, 0.0) for part in (*parts, p_NC, q_NC)]
                parts += [part.masked_fill(~is_other_NC, 0.0) for part in (p_NC, q_NC)]
            for sum_N, part_NC in zip(sums_6N, parts, strict=False):
                sum_N += part_NC.sum(dim=1)
        value_N, sum_N, *of_parts_N = columns.shard.all_reduce(sums_6N)
        other_N = None
        if least_N is not None:
            log_p_N, log_q_N = (_find_log_rest(*pair_N) for pair_N in zip(of_parts_N[:2], of_parts_N[2:], strict=True))
            value_of_other_N, slope_N = KINDS[divergence.kind](log_p_N, log_q_N, divergence.mixture)
            value_N, sum_N = value_N + value_of_other_N, sum_N + slope_N
            other_N = slope_N / log_p_N.exp()
        ctx.save_for_backward(hidden_NE, weight_VE, *log_sums_2N, least_N, sum_N, other_N)
        ctx.teacher, ctx.columns, ctx.temperature, ctx.divergence = teacher, columns, temperature, divergence
        ctx.parameter = weight_VE if adds_to_main_grad and find_main_grad(weight_VE) is not None else None
        return value_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_NE, weight_VE, *log_sums_2N, least_N, sum_N, other_N = ctx.saved_tensors
        policy = TargetRows(hidden_NE, weight_VE)
        pair = _Pair(policy, ctx.teacher, (log_sums_2N[0], log_sums_2N[1]), least_N, ctx.temperature)
        grad_N1 = (grad_N / ctx.temperature)[:, None]

        def differentiate(block: slice, _: torch.Tensor) -> torch.Tensor:
            log_p_NC, log_q_NC, is_other_NC = pair.compute_block(block)
            _, slope_NC = KINDS[ctx.divergence.kind](log_p_NC, log_q_NC, ctx.divergence.mixture)
            p_NC = log_p_NC.exp()
            if is_other_NC is not None:
                slope_NC = torch.where(is_other_NC, p_NC * other_N[:, None], slope_NC)
            return slope_NC.sub_(p_NC.mul_(sum_N[:, None])).mul_(grad_N1).to(weight_VE.dtype)

        grads = add_block_gradients(
            hidden_NE, weight_VE, ctx.columns, ctx.parameter, ctx.needs_input_grad, differentiate, plain
        )
        return *grads, None, None, None, None, None


def _sum_up(rows: TargetRows, columns: Columns, temperature: float) -> torch.Tensor:
    """Return each row's largest logit, and the logarithm of the sum of exponentials beside it, over all ranks."""
    statistics = RowStatistics(rows.hidden_NE, with_entropies=False)
    for block, targets_N in columns.blocks():
        plain.add_block(statistics, rows.hidden_NE, rows.weight_VE[block], targets_N, temperature)
    statistics.reduce(columns.shard)
    return torch.stack((statistics.max_N, statistics.sum_N.log()))


def _compute_log_probs(rows: TargetRows, block: slice, temperature: float, log_sum_2N: torch.Tensor) -> torch.Tensor:
    max_N, log_sum_N = log_sum_2N
    logits_NC = plain.scale_logits(rows.hidden_NE, rows.weight_VE[block], temperature)
    return logits_NC.sub_(max_N[:, None]).sub_(log_sum_N[:, None])


def _find_log_rest(singly_N: torch.Tensor, together_N: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the probability of the tokens that count together, from the two parts of the sum.

    Each is exact where it is small: near 1 it has the error of all its terms.
    """
    rest_N = torch.where(singly_N < 0.5, 1 - singly_N, together_N)
    return rest_N.clamp(min=torch.finfo(rest_N.dtype).tiny).log()


def _find_least(
    rows: TargetRows, columns: Columns, temperature: float, count: int, log_sum_2N: torch.Tensor
) -> torch.Tensor:
    """Return the least of each row's `count` largest log-probs, over all ranks. Equal ones all count."""
    largest_NK = log_sum_2N.new_full((len(rows.hidden_NE), count), -math.inf)
    for block, _ in columns.blocks():
        log_q_NC = _compute_log_probs(rows, block, temperature, log_sum_2N)
        largest_NK = torch.cat((largest_NK, log_q_NC), dim=1).topk(count, dim=1).values
    group = columns.shard.group
    if group is not None and group.size() > 1:
        of_ranks = [torch.empty_like(largest_NK) for _ in range(group.size())]
        dist.all_gather(of_ranks, largest_NK, group=group)
        largest_NK = torch.cat(of_ranks, dim=1).topk(count, dim=1).values
    return largest_NK.amin(dim=1)
