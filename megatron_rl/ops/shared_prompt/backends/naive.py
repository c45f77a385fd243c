"""The definition of shared-prompt attention: a dense mask, a softmax, two products. Every backend is tested against it.

Letters: T tokens, S segments, H query heads, G key-value heads, D head dimension, V that of values, I = H / G.
"""

import dataclasses

import torch

from megatron_rl.ops.backends import refuse_nothing
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.shared_prompt.tables import find_tables

refusal = refuse_nothing


@dataclasses.dataclass(frozen=True)
class MaskTables:
    """The tensors that the mask is computed from. Each layer computes the mask again: the layout would keep it."""

    segments_T: torch.Tensor
    positions_T: torch.Tensor
    ancestors_SS: torch.Tensor

    @classmethod
    def of(cls, layout: Layout) -> "MaskTables":
        arrays = (layout.segment_of_token, layout.positions, layout.ancestors)
        return cls(*(torch.from_numpy(array) for array in arrays))

    def visible(self, window: int | None) -> torch.Tensor:
        """Compute `layout.visible(window)` on the device."""
        rows_TS = self.ancestors_SS.index_select(0, self.segments_T)
        mask_TT = rows_TS.index_select(1, self.segments_T).tril()
        if window is not None:
            mask_TT &= self.positions_T[:, None] - self.positions_T < window
        return mask_TT


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> MaskTables:
    """Return the tables that the mask is computed from."""
    return layout.once(MaskTables.of)


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGV: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Average, for each token, the values of the tokens that it sees; compute the softmax in fp32 or better.

    A sink takes its share of the weights, and adds nothing.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_groups = k_TGD.shape[1]
    mask_TT = find_tables(layout, q_THD.device, MaskTables.of).visible(window)
    q_GITD = q_THD.reshape(num_tokens, num_groups, num_heads // num_groups, head_dim).permute(1, 2, 0, 3)
    k_G1DT = k_TGD.permute(1, 2, 0).unsqueeze(1)
    v_G1TV = v_TGV.transpose(0, 1).unsqueeze(1)
    scores_GITT = (q_GITD @ k_G1DT) * scale
    softmax_dtype = torch.promote_types(q_THD.dtype, torch.float32)
    logits_GITT = scores_GITT.masked_fill(~mask_TT, float("-inf"))
    if sinks_H is None:
        weights_GITT = logits_GITT.softmax(dim=-1, dtype=softmax_dtype)
    else:
        sinks_GIT1 = sinks_H.to(softmax_dtype).reshape(num_groups, -1, 1, 1).expand(-1, -1, num_tokens, -1)
        weights_GITT = torch.cat((logits_GITT.to(softmax_dtype), sinks_GIT1), dim=-1).softmax(dim=-1)[..., :-1]
    out_GITV = weights_GITT.to(v_TGV.dtype) @ v_G1TV
    return out_GITV.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, v_TGV.shape[-1])
