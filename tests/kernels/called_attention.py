"""One call of an attention operator, by the definition; the stand-ins for operators of devices compute with it.

Letters: H query heads, G key-value heads, N rows of queries, M rows of keys, D head dimension; more dimensions may
precede.
"""

import torch


def attend(
    q_HND: torch.Tensor, k_GMD: torch.Tensor, v_GMD: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the greatest score of each row, and the sum of exponentials relative to it, in fp32."""
    scores_HNM = _score(q_HND, k_GMD, is_causal, scale)
    greatest_HN = scores_HNM.amax(-1)
    weights_HNM = torch.exp(scores_HNM - greatest_HN.unsqueeze(-1))
    total_HN = weights_HNM.sum(-1)
    return (weights_HNM / total_HN.unsqueeze(-1)) @ _repeat(v_GMD, q_HND), greatest_HN, total_HN


def differentiate(
    grad_HND: torch.Tensor,
    q_HND: torch.Tensor,
    k_GMD: torch.Tensor,
    v_GMD: torch.Tensor,
    out_HND: torch.Tensor,
    lse_HN: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values in fp32, from an output and logarithms that may be merged."""
    weights_HNM = torch.exp(_score(q_HND, k_GMD, is_causal, scale) - lse_HN.unsqueeze(-1))
    grad_HND, out_HND = grad_HND.float(), out_HND.float()
    delta_HN1 = (grad_HND * out_HND).sum(-1, keepdim=True)
    grad_scores_HNM = weights_HNM * (grad_HND @ _repeat(v_GMD, q_HND).mT - delta_HN1) * scale
    of_keys, of_values = (
        part_HMD.unflatten(-3, (k_GMD.shape[-3], -1)).sum(-3)
        for part_HMD in (grad_scores_HNM.mT @ q_HND.float(), weights_HNM.mT @ grad_HND)
    )
    return grad_scores_HNM @ _repeat(k_GMD, q_HND), of_keys, of_values


def _score(q_HND: torch.Tensor, k_GMD: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    """Return scores; the diagonal of a causal mask ends at the bottom right."""
    scores_HNM = q_HND.float() @ _repeat(k_GMD, q_HND).mT * scale
    if not is_causal:
        return scores_HNM
    num_rows, num_keys = scores_HNM.shape[-2:]
    visible_NM = torch.ones(num_rows, num_keys, dtype=torch.bool).tril(num_keys - num_rows)
    return scores_HNM.masked_fill(~visible_NM, float("-inf"))


def _repeat(rows_GMD: torch.Tensor, q_HND: torch.Tensor) -> torch.Tensor:
    return rows_GMD.float().repeat_interleave(q_HND.shape[-3] // rows_GMD.shape[-3], -3)
