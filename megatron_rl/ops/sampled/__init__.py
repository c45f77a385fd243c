"""The log-prob and the rank of one chosen column in each row of logits.

Letters: R rows, V columns, one for each token of the vocabulary.
"""

from typing import NamedTuple

import torch

from megatron_rl.ops import trials

__all__ = ["Scores", "score", "score_naively", "try_kernel"]

# Columns that end inside the kernel's third block. The kernel is compiled for rows with a length of any number, and for
# those whose length is a multiple of 16, as most vocabularies' is.
_NUMS_COLUMNS = (8201, 8208)


class Scores(NamedTuple):
    """The log-probs and ranks of the chosen columns."""

    log_probs_R: torch.Tensor
    """Their log-probs, in float32."""
    ranks_R: torch.Tensor
    """The number of columns that are at least as large, in int64; 1 for the largest."""


def score_naively(logits_RV: torch.Tensor, chosen_R: torch.Tensor) -> Scores:
    """Define the scores, in float64 if the logits are, else in float32."""
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    values_RV, chosen_R1 = logits_RV.to(dtype), chosen_R[:, None]
    log_probs_R = values_RV.log_softmax(-1).gather(1, chosen_R1)[:, 0]
    return Scores(log_probs_R, (values_RV >= values_RV.gather(1, chosen_R1)).sum(-1))


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
    try:
        for num_columns in _NUMS_COLUMNS:
            _try_columns(device, dtype, num_columns)
    except trials.TrialError as fault:
        return str(fault)
    return None


def _try_columns(device: torch.device, dtype: torch.dtype, num_columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_RV = (4 * torch.randn(5, num_columns, generator=generator)).to(dtype)
    logits_RV[:, ::7] = -torch.inf
    chosen_R = torch.tensor([1, 1601, 4803, 8191, 8200])

    def compute(device: torch.device, dtype: torch.dtype) -> Scores:
        return score(logits_RV.to(device), chosen_R.to(device))

    def define(device: torch.device, dtype: torch.dtype) -> Scores:
        return score_naively(logits_RV.to(dtype), chosen_R)

    # Ranks are so small that rounding explains no other one.
    trials.compare(("the log-prob", "the rank"), compute, define, device, torch.float32)
