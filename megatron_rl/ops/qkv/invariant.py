"""Heads whose numbers depend on their own row alone, to the last bit, as engines compute theirs (--batch-invariant).

Letters: T rows, G groups, D dimensions of a head, C columns of the product, F pairs that rotate.
"""

import torch

from megatron_rl.ops.backends import refuse_nothing
from megatron_rl.ops.invariant import gradients
from megatron_rl.ops.qkv import naive
from megatron_rl.ops.qkv.naive import HeadNorms

refusal = refuse_nothing


def split_heads(
    mixed_TC: torch.Tensor, num_groups: int, head_dim: int, rotation_T2F: torch.Tensor | None, norms: HeadNorms | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the same as `naive.split_heads`."""
    q_THD, k_TGD, v_TGD = naive.split_heads(mixed_TC, num_groups, head_dim, None, None)
    if norms is not None:
        assert not norms.is_zero_centered
        q_THD = gradients.normalize(q_THD, norms.q_weight_D, norms.epsilon)
        k_TGD = gradients.normalize(k_TGD, norms.k_weight_D, norms.epsilon)
    if rotation_T2F is not None:
        q_THD, k_TGD = (gradients.rotate(one, rotation_T2F) for one in (q_THD, k_TGD))
    return q_THD, k_TGD, v_TGD
