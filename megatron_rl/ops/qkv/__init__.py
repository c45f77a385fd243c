"""Heads from the product of queries, keys and values: their division, norms of queries and keys, and rope.

Megatron does this in about 20 operations forward, each of which reads and writes rows. The `triton` backend reads the
product once and writes each head once. The backend `torch` is Megatron's own code, so it has no function here; `naive`
is the definition that the kernels are tested against. `invariant` is for --batch-invariant.

A group of query heads shares a key head and a value head. Letters: T rows, G groups, H query heads, D dimensions of a
head, C columns of the product, F pairs of dimensions that rotate.
"""

import torch

from megatron_rl.ops.choice import Choice, choose_by_flag
from megatron_rl.ops.qkv import invariant, naive, triton_fused
from megatron_rl.ops.qkv.norms import HeadNorms

__all__ = ["BACKENDS", "HeadNorms", "choose_backend", "make_rotation", "split_heads"]

BACKENDS = ("triton", "torch")
# On a CPU the kernels only run in Triton's interpreter, as a test.
_ORDERS = {"cuda": BACKENDS}
_FUNCTIONS = {
    "triton": triton_fused.split_heads,
    "naive": naive.split_heads,
    "invariant": invariant.split_heads,
}


def choose_backend(name: str, device: str, dtype: torch.dtype, head_dim: int, has_latents: bool = False) -> Choice:
    """Choose the named backend, or the fastest with `auto`; raise a UsageError if the named one cannot run.

    `device` is the type of a torch.device, such as `cuda`. Latents give heads by several products.
    """

    def refuse(one: str) -> str | None:
        if one != "triton":
            return None
        if has_latents:
            return "it has no multi-latent attention"
        return triton_fused.refusal(device, dtype, head_dim)

    return choose_by_flag(
        "--qkv-backend",
        name,
        _ORDERS.get(device, ("torch",)),
        refuse,
    )


def split_heads(
    mixed_TC: torch.Tensor,
    num_groups: int,
    head_dim: int,
    rotation_T2F: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
    name: str = "triton",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [T, H, D], keys [T, G, D] and values [T, G, D] from their product.

    The columns of the product are group by group: its query heads, its key head and its value head. Queries and keys
    are normalized by `norms`, and then rotated by `rotation_T2F` (`make_rotation`) if there is one. The gradients are
    those of the product and of the norms' weights. T may be several dimensions of the product; heads have one.
    """
    return _FUNCTIONS[name](mixed_TC, num_groups, head_dim, rotation_T2F, norms)


def make_rotation(angles_TF: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return the cosine and the sine of each angle times the factor: [T, 2, F]."""
    rotation_T2F = torch.stack((angles_TF.cos(), angles_TF.sin()), dim=1)
    return rotation_T2F if factor == 1.0 else rotation_T2F * factor
