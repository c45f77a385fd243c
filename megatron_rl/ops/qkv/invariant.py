"""Heads whose numbers depend on their own row alone, to the last bit; engines compute theirs alike."""

import torch

from megatron_rl.ops.invariant import gradients
from megatron_rl.ops.qkv.norms import HeadNorms


def split_heads(
    mixed_TC: torch.Tensor,
    num_groups: int,
    head_dim: int,
    rotation_T2F: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the same as `naive.split_heads`."""
    mixed_TGJD = mixed_TC.reshape(mixed_TC.shape[:-1].numel(), num_groups, -1, head_dim)
    q_TGID, k_TG1D, v_TG1D = mixed_TGJD.split((mixed_TGJD.shape[2] - 2, 1, 1), dim=2)
    q_THD, k_TGD, v_TGD = (part.flatten(1, 2) for part in (q_TGID, k_TG1D, v_TG1D))
    if norms is not None:
        assert not norms.is_zero_centered
        q_THD = gradients.normalize(q_THD, norms.q_weight_D, norms.epsilon)
        k_TGD = gradients.normalize(k_TGD, norms.k_weight_D, norms.epsilon)
    if rotation_T2F is not None:
        q_THD, k_TGD = (gradients.rotate(one, rotation_T2F) for one in (q_THD, k_TGD))
    return q_THD, k_TGD, v_TGD
