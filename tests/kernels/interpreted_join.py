"""The kernel that joins results of attention, and its twin, against float64; test_interpreted.py runs this."""

import pytest
import torch

from megatron_rl.ops.shared_prompt.backends.cudnn import AttentionPart, join, join_plainly

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("dtype", "num_strands", "length", "num_heads", "head_dim"),
    [(BF16, 3, 21, 2, 64), (FP16, 1, 40, 3, 96), (BF16, 2, 17, 1, 256), (FP32, 5, 7, 2, 8)],
)
def test_results_are_joined_by_their_shares_of_the_denominator(
    dtype: torch.dtype, num_strands: int, length: int, num_heads: int, head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(num_strands)
    num_rows = num_strands * length

    def draw(*shape: int, factor: float = 1.0) -> torch.Tensor:
        return factor * torch.randn(*shape, generator=generator)

    own_lse, above_lse = draw(num_strands, num_heads, length, factor=9), draw(num_heads, num_rows, factor=9)
    own_NHD, above_NHD = (draw(num_rows, num_heads, head_dim).to(dtype) for _ in range(2))
    # The definition, row by row.
    truth_NHD = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float64)
    joined_NH = torch.empty(num_rows, num_heads, dtype=torch.float64)
    for row in range(num_rows):
        for head in range(num_heads):
            totals = torch.stack([own_lse[row // length, head, row % length], above_lse[head, row]]).double().exp()
            joined_NH[row, head] = totals.sum().log()
            results = torch.stack([own_NHD[row, head], above_NHD[row, head]]).double()
            truth_NHD[row, head] = (totals[:, None] * results).sum(0) / totals.sum()
    for way in (join, join_plainly):
        # Memory that is not written is not a number; the logarithms of all strands are replaced in their place.
        out_NHD, own_joined = torch.full_like(own_NHD, torch.nan), torch.full_like(own_lse, torch.nan)
        above_joined = above_lse.clone()
        way(AttentionPart(own_NHD, own_lse), AttentionPart(above_NHD, above_joined), out_NHD, own_joined, above_joined)
        # Half a unit in the last place, and fp32's own errors.
        bound = (0.5 * torch.finfo(dtype).eps + 4e-6) * truth_NHD.abs().max()
        assert (out_NHD.double() - truth_NHD).abs().max() <= bound
        for joined_HN in (above_joined, own_joined.transpose(0, 1).flatten(1)):
            assert (joined_HN.double().T - joined_NH).abs().max() <= 4e-6 * joined_NH.abs().max()
