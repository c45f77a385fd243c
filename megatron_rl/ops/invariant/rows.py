"""Products, norms, rotations and SwiGLU, each row by itself.

Letters: N rows, I inputs, O outputs, E hidden size, H heads, D dimensions of a head, F columns of an MLP.
"""

import torch
import torch.nn.functional as F

NUM_ROWS = 32
"""The rows of a call of a product in bf16: oneDNN sums by the number of rows."""
_FEWEST_ROWS, _FEWEST_OUTPUTS = 4, 48
"""In fp32 a product has as many at least: MKL sums smaller ones in other orders, in its reproducible mode too."""
_WIDTH = 16
"""Narrower products, and rows of other lengths, are summed by where a row lies in memory."""


def multiply(rows_NI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Compute rows @ weight.T; there must not be a bias.

    In fp32 it is one call. MKL's reproducible mode (`types.MKL_MODE`) must be set before MKL's first call.
    """
    assert bias_O is None
    num_outputs = len(weight_OI)
    weight_OI = _pad(weight_OI, max(-num_outputs % _WIDTH, _FEWEST_OUTPUTS - num_outputs))
    rows_NI, weight_IO = _pad(rows_NI).contiguous(), weight_OI.t()
    out_NO = rows_NI.new_empty(len(rows_NI), len(weight_OI))
    num_rows = max(len(rows_NI), _FEWEST_ROWS) if rows_NI.dtype is torch.float32 else NUM_ROWS
    num_whole = len(rows_NI) // num_rows * num_rows
    # Always with `out`: without it, a trainer's platform may have replaced the operator (`platforms.host`).
    for start in range(0, num_whole, num_rows):
        torch.mm(rows_NI[start : start + num_rows], weight_IO, out=out_NO[start : start + num_rows])
    num_left = len(rows_NI) - num_whole
    if num_left:
        padded_NI = rows_NI.new_zeros(num_rows, rows_NI.shape[1])
        padded_NI[:num_left] = rows_NI[num_whole:]
        of_padded_NO = torch.mm(padded_NI, weight_IO, out=out_NO.new_empty(num_rows, out_NO.shape[1]))
        out_NO[num_whole:] = of_padded_NO[:num_left]
    return out_NO[:, :num_outputs].contiguous()


def _pad(rows_NI: torch.Tensor, num_rows: int = 0) -> torch.Tensor:
    """Add columns of zeros up to a multiple of _WIDTH, and rows of zeros."""
    num_columns = -rows_NI.shape[1] % _WIDTH
    return F.pad(rows_NI, (0, num_columns, 0, num_rows)) if num_columns or num_rows else rows_NI


def add_in_pairs(terms: torch.Tensor) -> torch.Tensor:
    """Add up the last dimension: its second half to its first, until one is left."""
    while (size := terms.shape[-1]) > 1:
        half = (size + 1) // 2
        total = terms[..., :half].clone()
        total[..., : size - half] += terms[..., half:]
        terms = total
    return terms[..., 0]


def normalize(rows: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMS norm over the last dimension, in fp32."""
    wide = rows.float()
    mean = add_in_pairs(wide * wide) / wide.shape[-1]
    # A root and a quotient are exactly rounded, and the inverse root is not.
    return (wide / torch.sqrt(mean + eps)[..., None] * weight_E.float()).to(rows.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up over the halves of the last dimension, in fp32."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def rotate(heads_NHD: torch.Tensor, cosines_NF: torch.Tensor, sines_NF: torch.Tensor) -> torch.Tensor:
    """Rotate the first dimensions of each head, its first half against the second, in fp32."""
    width = 2 * cosines_NF.shape[-1]
    first, second = heads_NHD[..., :width].float().chunk(2, dim=-1)
    cosines_N1F, sines_N1F = cosines_NF[:, None], sines_NF[:, None]
    turned = (first * cosines_N1F - second * sines_N1F, second * cosines_N1F + first * sines_N1F)
    return torch.cat((*(part.to(heads_NHD.dtype) for part in turned), heads_NHD[..., width:]), dim=-1)


def turn(positions_N: torch.Tensor, frequencies_F: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cosines and sines of the angles at these positions, in fp32."""
    angles_NF = torch.outer(positions_N.double(), frequencies_F.double())
    # In float64 functions differ in their last bits at most, which a rounding to fp32 takes away.
    return angles_NF.cos().float(), angles_NF.sin().float()
