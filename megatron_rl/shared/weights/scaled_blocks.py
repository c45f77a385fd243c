"""Weights that are stored as 8-bit floats with a factor for each block of 128 x 128 numbers, as DeepSeek-V3's.

The factors of a tensor lie beside it, in a tensor whose name has a suffix. The weights themselves are the products.

Letters: R rows, C columns, B blocks in a column of blocks, D blocks in a row of blocks.
"""

import torch

from megatron_rl.shared.weights.families.quantization import BLOCK

SUFFIX = "_scale_inv"
CODE = "F8_E4M3"
"""The format's code for such floats."""
DTYPE = "bfloat16"
"""The dtype of the products."""


def shape_factors(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the factors of a tensor; the last blocks may be smaller."""
    return tuple(-(-length // BLOCK) for length in shape)


def unpack(stored_RC: torch.Tensor, factors_BD: torch.Tensor) -> torch.Tensor:
    """Return the products [R, C], which are computed in float32 and rounded once."""
    num_columns = stored_RC.shape[1]
    product_RC = torch.empty(stored_RC.shape, dtype=getattr(torch, DTYPE))
    for block, factors_D in enumerate(factors_BD.float()):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        product_RC[rows] = stored_RC[rows].float() * factors_D.repeat_interleave(BLOCK)[:num_columns]
    return product_RC
