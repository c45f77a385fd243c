"""The kernel that joins two results of attention. Importing this imports Triton.

Letters: N rows, M rows of a block, H query heads, D head dimension (in a block WIDTH columns, a power of two).
"""

import triton
import triton.language as tl

from megatron_rl.ops.shared_prompt.backends.triton_kernels import _rounded


@triton.jit(do_not_specialize=["num_rows", "length"])
def join_results_kernel(
    own_NHD: tl.tensor,
    above_NHD: tl.tensor,
    own_lse: tl.tensor,
    above_lse: tl.tensor,
    out_NHD: tl.tensor,
    own_joined: tl.tensor,
    above_joined: tl.tensor,
    num_rows: tl.tensor,
    length: tl.tensor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Average rows of one head by their shares of the joined denominator, whose logarithm is stored in both orders."""
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    rows_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_M = rows_M < num_rows
    # A strand's logarithms lie head after head, and so do those of all strands together.
    of_own_M = (rows_M // length * num_heads + head) * length + rows_M % length
    of_above_M = head * num_rows + rows_M
    own_lse_M = tl.load(own_lse + of_own_M, mask=is_row_M, other=0.0)
    above_lse_M = tl.load(above_lse + of_above_M, mask=is_row_M, other=0.0)
    greatest_M = tl.maximum(own_lse_M, above_lse_M)
    own_M = tl.exp(own_lse_M - greatest_M)
    above_M = tl.exp(above_lse_M - greatest_M)
    totals_M = own_M + above_M
    joined_M = greatest_M + tl.log(totals_M)
    tl.store(own_joined + of_own_M, joined_M, mask=is_row_M)
    tl.store(above_joined + of_above_M, joined_M, mask=is_row_M)
    columns = tl.arange(0, WIDTH)
    places_MD = ((rows_M.to(tl.int64) * num_heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    mask_MD = is_row_M[:, None] & (columns < HEAD_DIM)[None, :]
    own_MD = tl.load(own_NHD + places_MD, mask=mask_MD, other=0.0).to(tl.float32)
    above_MD = tl.load(above_NHD + places_MD, mask=mask_MD, other=0.0).to(tl.float32)
    out_MD = own_MD * (own_M / totals_M)[:, None] + above_MD * (above_M / totals_M)[:, None]
    tl.store(out_NHD + places_MD, _rounded(out_MD, out_NHD.dtype.element_ty), mask=mask_MD)
