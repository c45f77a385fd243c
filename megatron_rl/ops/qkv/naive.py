"""The definition: what Megatron's operations do with the product of queries, keys and values, one by one.

Letters: T rows, G groups, H query heads, D dimensions of a head, C columns of the product, F pairs that rotate.
"""

import dataclasses

import torch

from megatron_rl.ops.backends import refuse_nothing

refusal = refuse_nothing


@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """The norms of queries and keys, each over the dimensions of one head.

    That is x / sqrt(mean(x^2) + epsilon) times a weight that all heads share.
    """

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    epsilon: float
    is_zero_centered: bool = False
    """True if the weights are those less 1."""


def split_heads(
    mixed_TC: torch.Tensor, num_groups: int, head_dim: int, rotation_T2F: torch.Tensor | None, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the same as `qkv.split_heads`, and round after each operation as Megatron does."""
    mixed_TGSD = mixed_TC.flatten(0, -2).unflatten(-1, (num_groups, -1, head_dim))
    q_THD, k_TGD, v_TGD = mixed_TGSD[..., :-2, :].flatten(-3, -2), mixed_TGSD[..., -2, :], mixed_TGSD[..., -1, :]
    if norms is not None:
        q_THD = _normalize(q_THD, norms.q_weight_D, norms)
        k_TGD = _normalize(k_TGD, norms.k_weight_D, norms)
    if rotation_T2F is not None:
        q_THD, k_TGD = _turn(q_THD, rotation_T2F), _turn(k_TGD, rotation_T2F)
    return q_THD, k_TGD, v_TGD


def _normalize(x_THD: torch.Tensor, weight_D: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
    """Divide by the root of the mean square, in at least 32 bits."""
    wide_THD = x_THD.to(torch.promote_types(x_THD.dtype, torch.float32))
    root_TH1 = (wide_THD.square().mean(dim=-1, keepdim=True) + norms.epsilon).sqrt()
    return (wide_THD / root_TH1 * (weight_D.to(wide_THD.dtype) + int(norms.is_zero_centered))).to(x_THD.dtype)


def _turn(x_THD: torch.Tensor, rotation_T2F: torch.Tensor) -> torch.Tensor:
    """Multiply the complex numbers x[i] + j x[F + i] by cos + j sin; dimensions from 2F on stay."""
    num_pairs = rotation_T2F.shape[-1]
    rotation_T2F = rotation_T2F.to(x_THD.dtype).reshape(*x_THD.shape[:-2], 1, 2, num_pairs)
    cos_T1F, sin_T1F = rotation_T2F.unbind(-2)
    real_THF, imaginary_THF, rest = x_THD.tensor_split((num_pairs, 2 * num_pairs), dim=-1)
    rotated = (real_THF * cos_T1F - imaginary_THF * sin_T1F, real_THF * sin_T1F + imaginary_THF * cos_T1F)
    return torch.cat((*rotated, rest), dim=-1)
