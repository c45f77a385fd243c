"""Launches of the kernels of the `triton` backend, and their operation of autograd.

Letters: T rows, G groups, H query heads, D dimensions of a head, C columns of the product, F pairs that rotate.
"""

import math
from typing import Any

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.qkv.naive import HeadNorms
from megatron_rl.ops.triton_support import launch, refuse_triton

# The pairs that a program has at once: 8 a thread, so that 16-bit numbers are loaded 16 bytes at once.
_PAIRS, NUM_WARPS = 1024, 4
# The turns of a program of the backward pass that sums over its rows. The number is the same on every device, and so
# are the sums.
_TILES = 4
WIDEST = 256


def refusal(conditions: Conditions) -> str | None:
    """Refuse what `refuse_triton` does, latents, and odd or wide heads."""
    head_dim = conditions.head_dim or 0
    if conditions.has_latents:
        return "it has no multi-latent attention"
    if head_dim % 2 or head_dim > WIDEST:
        return f"heads must have an even number of dimensions up to {WIDEST}, and the model's have {head_dim}"
    return refuse_triton(conditions.device, conditions.dtype)


def split_heads(
    mixed_TC: torch.Tensor, num_groups: int, head_dim: int, rotation_T2F: torch.Tensor | None, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the same as `naive.split_heads`, rounded once."""
    weights = (None, None) if norms is None else (norms.q_weight_D, norms.k_weight_D)
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _SplitHeads.apply(
        mixed_TC, *weights, rotation_T2F, num_groups, head_dim, norms
    )
    return heads


def compute_sizes(head_dim: int) -> dict[str, int]:
    """Return the rows and the pairs, with padding, that a program has at once: powers of two."""
    width = 1 << (head_dim // 2 - 1).bit_length()
    return {"ROWS": max(1, _PAIRS // width), "WIDTH": width}


def count_tiles(is_normalized: bool) -> int:
    """Return the turns of a program of the backward pass."""
    return _TILES if is_normalized else 1


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed_TC: torch.Tensor,
        q_weight_D: torch.Tensor | None,
        k_weight_D: torch.Tensor | None,
        rotation_T2F: torch.Tensor | None,
        num_groups: int,
        head_dim: int,
        norms: HeadNorms | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from megatron_rl.ops.qkv.triton_kernels import split_heads_kernel

        mixed_TC = mixed_TC.contiguous()
        *rows, num_columns = mixed_TC.shape
        num_rows = math.prod(rows)
        queries = num_columns // (num_groups * head_dim) - 2
        q_THD = mixed_TC.new_empty((num_rows, num_groups * queries, head_dim))
        k_TGD, v_TGD = (mixed_TC.new_empty((num_rows, num_groups, head_dim)) for _ in range(2))
        constants = {
            "QUERIES": queries,
            "HEAD_DIM": head_dim,
            "ROTATED": 0 if rotation_T2F is None else rotation_T2F.shape[-1],
            "IS_NORMALIZED": norms is not None,
            "ADDED": int(norms is not None and norms.is_zero_centered),
            **compute_sizes(head_dim),
        }
        epsilon = 0.0 if norms is None else norms.epsilon
        if num_rows:
            grid = -(-num_rows // constants["ROWS"]), num_groups
            launch(
                split_heads_kernel, grid,
                mixed_TC, _or(rotation_T2F, mixed_TC), _or(q_weight_D, mixed_TC), _or(k_weight_D, mixed_TC),
                q_THD, k_TGD, v_TGD, num_rows, epsilon, **constants, num_warps=NUM_WARPS,
            )  # fmt: skip
        # Rotating back needs no inputs, so without norms the product's memory is free.
        ctx.save_for_backward(mixed_TC if norms is not None else None, q_weight_D, k_weight_D, rotation_T2F)
        ctx.constants, ctx.num_groups, ctx.epsilon, ctx.shape = constants, num_groups, epsilon, mixed_TC.shape
        return q_THD, k_TGD, v_TGD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """Compute the gradients of the product and of the norms' weights."""
        from megatron_rl.ops.qkv.triton_kernels import heads_gradient_kernel

        mixed_TC, q_weight_D, k_weight_D, rotation_T2F = ctx.saved_tensors
        grad_q_THD, grad_k_TGD, grad_v_TGD = (grad.contiguous() for grad in grads)
        grad_mixed_TC = grad_q_THD.new_empty(ctx.shape)
        constants, num_rows, is_normalized = ctx.constants, math.prod(ctx.shape[:-1]), mixed_TC is not None
        tiles = count_tiles(is_normalized)
        grid = -(-num_rows // (constants["ROWS"] * tiles)), ctx.num_groups
        partial_N2D = None
        if is_normalized:
            partial_N2D = grad_q_THD.new_empty((math.prod(grid), 2, constants["HEAD_DIM"]), dtype=torch.float32)
        if num_rows:
            given = (_or(tensor, grad_mixed_TC) for tensor in (mixed_TC, rotation_T2F, q_weight_D, k_weight_D))
            launch(
                heads_gradient_kernel, grid,
                *given, grad_q_THD, grad_k_TGD, grad_v_TGD, grad_mixed_TC, _or(partial_N2D, grad_mixed_TC),
                num_rows, ctx.epsilon, **constants, TILES=tiles, num_warps=NUM_WARPS,
            )  # fmt: skip
        if partial_N2D is None:
            return grad_mixed_TC, None, None, None, None, None, None
        grad_q_weight_D, grad_k_weight_D = partial_N2D.sum(dim=0).to(q_weight_D.dtype)
        return grad_mixed_TC, grad_q_weight_D, grad_k_weight_D, None, None, None, None


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return the tensor; if there is none, another one, which the kernel then does not touch in its place."""
    return other if tensor is None else tensor
