"""The definition of shared-prompt attention: a dense mask, a softmax, two products. Every backend is tested against it.

Letters: T tokens, H query heads, G key-value heads, D head dimension, I = H / G.
"""

import torch

from megatron_rl.ops.shared_prompt.layout import Layout


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Average, for each token, the values of the tokens it sees; the softmax is taken in fp32 or better."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_groups = k_TGD.shape[1]
    mask_TT = torch.from_numpy(layout.visible(window)).to(q_THD.device)
    q_GITD = q_THD.reshape(num_tokens, num_groups, num_heads // num_groups, head_dim).permute(1, 2, 0, 3)
    k_G1DT = k_TGD.permute(1, 2, 0).unsqueeze(1)
    v_G1TD = v_TGD.transpose(0, 1).unsqueeze(1)
    scores_GITT = (q_GITD @ k_G1DT) * scale
    softmax_dtype = torch.promote_types(q_THD.dtype, torch.float32)
    weights_GITT = scores_GITT.masked_fill(~mask_TT, float("-inf")).softmax(dim=-1, dtype=softmax_dtype)
    out_GITD = weights_GITT.to(v_TGD.dtype) @ v_G1TD
    return out_GITD.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
