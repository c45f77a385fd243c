"""Heads from the product of queries, keys and values: their division, norms of queries and keys, and rope.

Megatron does this in about 20 operations forward, each of which reads and writes rows. The `triton` backend reads the
product once and writes each head once. With the backend `torch` a model runs Megatron's own code; its function here is
the definition that the kernels are tested against. `invariant` is for --batch-invariant.

A group of query heads shares a key head and a value head. Letters: T rows, G groups, H query heads, D dimensions of a
head, C columns of the product, F pairs of dimensions that rotate.
"""

import functools
from collections.abc import Iterator
from typing import Protocol

import torch

from megatron_rl.ops.backends import Backends, Conditions, Example, HasRefusal
from megatron_rl.ops.qkv import naive
from megatron_rl.ops.qkv.naive import HeadNorms

__all__ = ["BACKENDS", "HeadNorms", "make_rotation", "split_heads"]


class HeadBackend(HasRefusal, Protocol):
    def split_heads(
        self,
        mixed_TC: torch.Tensor,
        num_groups: int,
        head_dim: int,
        rotation_T2F: torch.Tensor | None,
        norms: HeadNorms | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values."""


# The trial's groups, whose last program has rows left over in the forward and in the backward pass.
_NUM_ROWS, _NUM_GROUPS, _EPSILON = 150, 2, 1e-6
_RESULTS = (
    "queries", "keys", "values", "the gradient of their product", "the gradient of the norm of queries",
    "the gradient of the norm of keys",
)  # fmt: skip


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
    return BACKENDS.find(name).split_heads(mixed_TC, num_groups, head_dim, rotation_T2F, norms)


def make_rotation(angles_TF: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return the cosine and the sine of each angle times the factor: [T, 2, F]."""
    rotation_T2F = torch.stack((angles_TF.cos(), angles_TF.sin()), dim=1)
    return rotation_T2F if factor == 1.0 else rotation_T2F * factor


def _list_examples(conditions: Conditions) -> Iterator[Example]:
    """Yield heads with norms, and without."""
    queries, head_dim = conditions.queries, conditions.head_dim
    assert head_dim is not None
    generator = torch.Generator().manual_seed(0)
    heads = ((_NUM_ROWS, of * _NUM_GROUPS, head_dim) for of in (queries, 1, 1))
    shapes = ((_NUM_ROWS, _NUM_GROUPS * (queries + 2) * head_dim), (head_dim,), (head_dim,), *heads)
    inputs = [torch.randn(shape, generator=generator).to(conditions.dtype) for shape in shapes]
    angles_TF = 9 * torch.randn(_NUM_ROWS, head_dim // 2, generator=generator)

    def compute(with_norms: bool, name: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        mixed_TC, *weights = (tensor.to(device, dtype).requires_grad_() for tensor in inputs[:3])
        rotation_T2F = make_rotation(angles_TF.to(device, torch.promote_types(dtype, torch.float32)))
        norms = HeadNorms(weights[0], weights[1], _EPSILON) if with_norms else None
        heads = split_heads(mixed_TC, _NUM_GROUPS, head_dim, rotation_T2F, norms, name)
        leaves = [mixed_TC, *weights] if with_norms else [mixed_TC]
        return [*heads, *torch.autograd.grad(heads, leaves, [tensor.to(device, dtype) for tensor in inputs[3:]])]

    for with_norms in (True, False):
        results = _RESULTS if with_norms else _RESULTS[:4]
        yield Example("heads", results, functools.partial(compute, with_norms), f"heads of {head_dim}, ")


BACKENDS: Backends[HeadBackend] = Backends(
    "--qkv-backend",
    {"triton": "megatron_rl.ops.qkv.triton_fused", "torch": naive},
    orders={"cuda": ("triton", "torch")},
    # On a CPU the kernels only run in Triton's interpreter, as a test.
    elsewhere=("torch",),
    definition="torch",
    list_examples=_list_examples,
    others={"invariant": "megatron_rl.ops.qkv.invariant"},
    untried=("torch",),
)
