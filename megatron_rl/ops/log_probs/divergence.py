"""The divergence of the policy's distribution over the vocabulary from teachers', each made of hidden states.

All vocabularies are divided over ranks alike, and computed in the same blocks of columns. Neither pass ever holds an
array of all logits. One pass over the blocks finds a teacher's normalizers and, with `top_k`, the least of its
likeliest logits. Another one adds up the divergence. The backward pass computes each block again, once for log-probs,
entropies and divergences together.

For a divergence D of probabilities p and q, the gradient of a logit of p is p g - p S. Here g is the derivative of D by
p, and S the sum of p g over the vocabulary. So each kind of divergence is a term of D, and p g.

Letters: N rows, E and F the two hidden sizes, V this rank's columns of the vocabulary, C the columns of one block.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.ops.log_probs import TargetRows, VocabularyShard, divide_columns, find_backend, plain
from megatron_rl.ops.log_probs.function import Columns, GradientFactors, RowStatistics, add_block_gradients, sum_up
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


def output_divergences(
    policy: TargetRows,
    targets_N: torch.Tensor,
    teachers: Sequence[tuple[TargetRows, Divergence]],
    shard: VocabularyShard,
    temperature: float = 1.0,
    block_columns: int | None = None,
    with_entropies: bool = False,
    backend: str = "auto",
    adds_to_main_grad: bool = False,
) -> torch.Tensor:
    """Return the columns of `output_log_probs`, and one for the divergence of each row from each teacher's.

    Only the policy gets gradients. Log-probs and entropies are the backend's to the last bit; all else is computed in
    torch's operations.
    """
    chosen = find_backend(policy.hidden_NE, backend)
    of_backend, columns = (divide_columns(policy, targets_N, shard, one, block_columns) for one in (chosen, plain))
    with torch.no_grad():
        statistics = sum_up(policy, of_backend, temperature, with_entropies, chosen)
    result: torch.Tensor = _Diverge.apply(
        policy.hidden_NE, policy.weight_VE, teachers, statistics, columns, temperature, adds_to_main_grad
    )
    return result


@dataclasses.dataclass(frozen=True)
class _Distribution:
    rows: TargetRows
    log_sum_2N: torch.Tensor
    """Two numbers to take from logits to make log-probs: the largest one, and the logarithm of the sum beside it.

    One after the other: their sum would round away what differs between two distributions that are nearly alike.
    """
    temperature: float

    def compute_block(self, block: slice) -> torch.Tensor:
        """Return the log-probs of a block."""
        max_N, log_sum_N = self.log_sum_2N
        logits_NC = plain.scale_logits(self.rows.hidden_NE, self.rows.weight_VE[block], self.temperature)
        return logits_NC.sub_(max_N[:, None]).sub_(log_sum_N[:, None])


@dataclasses.dataclass(frozen=True)
class _Teacher:
    """A teacher, and the numbers of each row that give the gradient of the divergence."""

    distribution: _Distribution
    divergence: Divergence
    least_N: torch.Tensor | None
    """The least of the log-probs that count singly; None if all do."""
    sum_N: torch.Tensor
    """The sum of p g."""
    other_N: torch.Tensor | None
    """g of the tokens that count together."""

    def differentiate_block(self, log_p_NC: torch.Tensor, block: slice) -> torch.Tensor:
        """Compute the gradient of the policy's logits in a block, before its division by the temperature."""
        log_q_NC = self.distribution.compute_block(block)
        _, slope_NC = KINDS[self.divergence.kind](log_p_NC, log_q_NC, self.divergence.mixture)
        p_NC = log_p_NC.exp()
        if self.least_N is not None and self.other_N is not None:
            slope_NC = torch.where(log_q_NC < self.least_N[:, None], p_NC * self.other_N[:, None], slope_NC)
        return slope_NC.sub_(p_NC.mul_(self.sum_N[:, None]))


class _Diverge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: torch.Tensor,
        weight_VE: torch.Tensor,
        teachers: Sequence[tuple[TargetRows, Divergence]],
        statistics: RowStatistics,
        columns: Columns,
        temperature: float,
        adds_to_main_grad: bool,
    ) -> torch.Tensor:
        policy = _Distribution(TargetRows(hidden_NE, weight_VE), _read_log_sums(statistics), temperature)
        compared = [_compare(policy, rows, divergence, columns) for rows, divergence in teachers]
        entropies_N = statistics.compute_entropies()
        ctx.save_for_backward(hidden_NE, weight_VE, statistics.max_N, statistics.sum_N, entropies_N)
        ctx.teachers = [teacher for _, teacher in compared]
        ctx.columns, ctx.temperature = columns, temperature
        ctx.parameter = weight_VE if adds_to_main_grad and find_main_grad(weight_VE) is not None else None
        of_policy = [statistics.compute_log_probs(), *([] if entropies_N is None else [entropies_N])]
        return torch.stack([*of_policy, *(value_N for value_N, _ in compared)], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        hidden_NE, weight_VE, max_N, sum_N, entropies_N = ctx.saved_tensors
        num_own = grad.shape[1] - len(ctx.teachers)
        of_own, *of_teachers = grad.split([num_own, *[1] * len(ctx.teachers)], dim=1)
        of_own = of_own if num_own > 1 else of_own[:, 0]
        factors = GradientFactors.of(of_own, ctx.temperature, max_N, sum_N, entropies_N)
        log_sum_N1 = sum_N.log()[:, None]

        def differentiate(block: slice, targets_N: torch.Tensor) -> torch.Tensor:
            away_NC = plain.scale_logits(hidden_NE, weight_VE[block], ctx.temperature).sub_(max_N[:, None])
            log_p_NC = away_NC - log_sum_N1
            grad_NC = plain.differentiate_logits(factors, away_NC, targets_N)
            for teacher, grad_N1 in zip(ctx.teachers, of_teachers, strict=True):
                grad_NC += teacher.differentiate_block(log_p_NC, block).mul_(grad_N1 / ctx.temperature)
            return grad_NC.to(weight_VE.dtype)

        grads = add_block_gradients(
            hidden_NE, weight_VE, ctx.columns, ctx.parameter, ctx.needs_input_grad, differentiate, plain
        )
        return *grads, None, None, None, None, None


def _compare(
    policy: _Distribution, rows: TargetRows, divergence: Divergence, columns: Columns
) -> tuple[torch.Tensor, _Teacher]:
    """Return the divergence of each row, and the numbers for its gradient."""
    log_sum_2N, least_N = _sum_up_teacher(rows, columns, policy.temperature, divergence.top_k)
    distribution, diverge = _Distribution(rows, log_sum_2N, policy.temperature), KINDS[divergence.kind]
    # Sums of D, of p g, of p and q where tokens count singly, and of p and q where they count together.
    sums_6N = log_sum_2N.new_zeros(6, log_sum_2N.shape[1])
    for block, _ in columns.blocks():
        log_p_NC, log_q_NC = policy.compute_block(block), distribution.compute_block(block)
        parts = [*diverge(log_p_NC, log_q_NC, divergence.mixture)]
        if least_N is not None:
            is_other_NC = log_q_NC < least_N[:, None]
            p_NC, q_NC = log_p_NC.exp_(), log_q_NC.exp_()
            parts = [part.masked_fill(is_other_NC, 0.0) for part in (*parts, p_NC, q_NC)]
            parts += [part.masked_fill(~is_other_NC, 0.0) for part in (p_NC, q_NC)]
        for sum_N, part_NC in zip(sums_6N, parts, strict=False):
            sum_N += part_NC.sum(dim=1)
    value_N, sum_N, *of_parts_N = columns.shard.all_reduce(sums_6N)
    other_N = None
    if least_N is not None:
        log_p_N, log_q_N = (_find_log_rest(*pair_N) for pair_N in zip(of_parts_N[:2], of_parts_N[2:], strict=True))
        value_of_other_N, slope_N = diverge(log_p_N, log_q_N, divergence.mixture)
        value_N, sum_N = value_N + value_of_other_N, sum_N + slope_N
        other_N = slope_N / log_p_N.exp()
    return value_N, _Teacher(distribution, divergence, least_N, sum_N, other_N)


def _sum_up_teacher(
    rows: TargetRows, columns: Columns, temperature: float, top_k: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what makes log-probs of logits, and the least of each row's `top_k` largest ones, over all ranks.

    Equal ones all count.
    """
    statistics = RowStatistics(rows.hidden_NE, with_entropies=False)
    largest_NK = None if top_k is None else statistics.max_N.new_full((len(statistics.max_N), top_k), -math.inf)
    for block, targets_N in columns.blocks():
        logits_NC = plain.scale_logits(rows.hidden_NE, rows.weight_VE[block], temperature)
        if largest_NK is not None:
            largest_NK = _keep_largest([largest_NK, logits_NC])
        plain.add_logits(statistics, logits_NC, targets_N)
    statistics.reduce(columns.shard)
    log_sum_2N, group = _read_log_sums(statistics), columns.shard.group
    if largest_NK is None:
        return log_sum_2N, None
    if group is not None and group.size() > 1:
        of_ranks = [torch.empty_like(largest_NK) for _ in range(group.size())]
        dist.all_gather(of_ranks, largest_NK, group=group)
        largest_NK = _keep_largest(of_ranks)
    max_N, log_sum_N = log_sum_2N
    return log_sum_2N, largest_NK.amin(dim=1).sub_(max_N).sub_(log_sum_N)


def _keep_largest(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest values of each row, in the number that the first part has."""
    return torch.cat(parts, dim=1).topk(parts[0].shape[1], dim=1).values


def _read_log_sums(statistics: RowStatistics) -> torch.Tensor:
    return torch.stack((statistics.max_N, statistics.sum_N.log()))


def _find_log_rest(singly_N: torch.Tensor, together_N: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the probability of the tokens that count together, from the two parts of the sum.

    Each is exact where it is small: near 1 it has the error of all its terms.
    """
    rest_N = torch.where(singly_N < 0.5, 1 - singly_N, together_N)
    return rest_N.clamp(min=torch.finfo(rest_N.dtype).tiny).log()
