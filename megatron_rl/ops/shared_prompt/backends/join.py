"""Two results of attention over different keys, joined into that over all of them.

Letters: N rows of several strands of R rows each, B strands, H query heads, D head dimension.
"""

from typing import NamedTuple

import torch

from megatron_rl.ops.kept_launches import launch
from megatron_rl.ops.triton_support import refuse_triton

# The rows of a program, and its warps.
ROWS, NUM_WARPS = 32, 4
NARROWEST = 16


class AttentionPart(NamedTuple):
    """A result of attention over a part of the keys, densely in memory."""

    out_NHD: torch.Tensor
    lse: torch.Tensor
    """The logarithm of each softmax's denominator in fp32: [B, H, R], or [H, N] from a call with all rows at once."""


def join(
    own: AttentionPart,
    above: AttentionPart,
    out_NHD: torch.Tensor,
    own_joined: torch.Tensor,
    above_joined: torch.Tensor,
) -> None:
    """Write the joined output, and its logarithms twice: as those of `own` lie, and as those of `above` do."""
    if refuse_triton(out_NHD.device.type, out_NHD.dtype) is not None:
        join_plainly(own, above, out_NHD, own_joined, above_joined)
        return
    from megatron_rl.ops.shared_prompt.backends.join_kernels import join_results_kernel

    num_rows, num_heads, head_dim = out_NHD.shape
    launch(
        join_results_kernel,
        (-(-num_rows // ROWS), num_heads),
        own.out_NHD,
        above.out_NHD,
        own.lse,
        above.lse,
        out_NHD,
        own_joined,
        above_joined,
        num_rows,
        own.lse.shape[-1],
        HEAD_DIM=head_dim,
        WIDTH=compute_columns(head_dim),
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )


def join_plainly(
    own: AttentionPart,
    above: AttentionPart,
    out_NHD: torch.Tensor,
    own_joined: torch.Tensor,
    above_joined: torch.Tensor,
) -> None:
    """Write the same by torch's operations."""
    own_HN = own.lse.transpose(0, 1).flatten(1)
    joined_HN = torch.logaddexp(own_HN, above.lse)
    own_share_NH1, above_share_NH1 = ((lse - joined_HN).exp().T.unsqueeze(-1) for lse in (own_HN, above.lse))
    out_NHD.copy_(own.out_NHD.float() * own_share_NH1 + above.out_NHD.float() * above_share_NH1)
    above_joined.copy_(joined_HN)
    own_joined.copy_(joined_HN.unflatten(1, (own.lse.shape[0], -1)).transpose(0, 1))


def compute_columns(head_dim: int) -> int:
    """Return the columns of a head in a block, a power of two."""
    return max(NARROWEST, 1 << (head_dim - 1).bit_length())
