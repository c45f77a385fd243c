"""The log-prob and the rank of one chosen column in each row of logits.

Letters: R rows, V columns, one for each token of the vocabulary.
"""

from typing import NamedTuple

import torch

__all__ = ["Scores", "score", "try_kernel"]

# A kernel adds in another order. Its distance from the truth may be this factor times the naive twin's, plus these
# units in the last place of the largest value.
_FACTOR, _UNITS = 2, 4
# Columns that end inside the kernel's third block. The kernel is compiled for rows with a length of any number, and for
# those whose length is a multiple of 16, as most vocabularies' is.
_NUMS_COLUMNS = (8201, 8208)


class Scores(NamedTuple):
    """The log-probs and ranks of the chosen columns."""

    log_probs_R: torch.Tensor
    """Their log-probs, in float32."""
    ranks_R: torch.Tensor
    """The number of columns that are at least as large, in int64; 1 for the largest."""


def score(logits_RV: torch.Tensor, chosen_R: torch.Tensor) -> Scores:
    """Score the chosen columns with the kernel, which reads each number once; the columns must lie side by side."""
    from megatron_rl.ops.sampled.triton_kernels import NUM_COLUMNS, NUM_WARPS, score_kernel

    num_rows, num_columns = logits_RV.shape
    scores = Scores(
        torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device),
        torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device),
    )
    if num_rows:
        score_kernel[(num_rows,)](
            logits_RV, logits_RV.stride(0), chosen_R, *scores, num_columns, COLUMNS=NUM_COLUMNS, num_warps=NUM_WARPS
        )
    return scores


def try_kernel(device: torch.device, dtype: torch.dtype) -> str | None:
    """Try the kernel on a device; return what is wrong with it, or None. No later call waits for it to compile."""
    faults = (_try_columns(device, dtype, num_columns) for num_columns in _NUMS_COLUMNS)
    return next((fault for fault in faults if fault is not None), None)


def _try_columns(device: torch.device, dtype: torch.dtype, num_columns: int) -> str | None:
    from megatron_rl.ops.sampled import naive

    generator = torch.Generator().manual_seed(0)
    logits_RV = (4 * torch.randn(5, num_columns, generator=generator)).to(dtype)
    logits_RV[:, ::7] = -torch.inf
    chosen_R = torch.tensor([1, 1601, 4803, 8191, 8200])
    truth, plain = (naive.score(logits_RV.to(kind), chosen_R) for kind in (torch.float64, torch.float32))
    try:
        found = Scores(*(part.cpu() for part in score(logits_RV.to(device), chosen_R.to(device))))
    except Exception as error:
        # A compiler may fail in many ways, and all mean that the kernel cannot be used.
        return f"the kernel failed: {type(error).__name__}: {error}"
    largest = truth.log_probs_R.abs().max().item()
    bound = _FACTOR * _distance(plain, truth) + _UNITS * torch.finfo(torch.float32).eps * largest
    # Written so that NaN is wrong too.
    if not _distance(found, truth) <= bound:
        return f"its log-probs are off by {_distance(found, truth):.3g}, and rounding explains {bound:.3g}"
    if not torch.equal(found.ranks_R, truth.ranks_R):
        return f"its ranks are {found.ranks_R.tolist()}, and must be {truth.ranks_R.tolist()}"
    return None


def _distance(found: Scores, truth: Scores) -> float:
    return (found.log_probs_R.double() - truth.log_probs_R).abs().max().item()
