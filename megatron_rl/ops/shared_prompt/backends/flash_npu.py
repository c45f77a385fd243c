"""The NPU's fused attention for sequences of varying length: torch_npu's operators in their TND layout.

They return the greatest score and the sum of exponentials of each row and head, each written eight times. The tensor's
shape is [rows, heads, 8], but its memory order differs: each sequence's part lies as [heads, its rows, 8]. The gradient
operator takes them in that order too. Here it gets the logarithm of the denominator as the greatest score, and 1 as the
sum: that is the same softmax.

Letters: N rows of queries, H query heads, D head dimension, S sequences.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.ops.shared_prompt.backends.flash_varlen import Kernels, SequenceOffsets, VarlenCall

# The copies of each statistic that the operators write, and the side of the square mask for all causal masks.
_COPIES = 8
_MASK_SIDE = 2048
_BOTTOM_RIGHT = 3


def attend(inputs: Sequence[torch.Tensor], call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
    num_heads = inputs[0].shape[1]
    out_NHD, greatest, total, *_ = _import_operators().npu_fusion_attention(
        *inputs, num_heads, "TND", scale=call.scale, **_list_options(call, inputs[0].device)
    )
    lse = greatest.select(-1, 0) + total.select(-1, 0).log()
    return out_NHD, lse.reshape(-1)[_find_places_HN(call.queries, num_heads)]


def differentiate(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], call: VarlenCall
) -> list[torch.Tensor]:
    grad_out_NHD, out_NHD, lse_HN = outputs
    num_rows, num_heads = out_NHD.shape[:2]
    lse = torch.empty(num_rows * num_heads, dtype=torch.float32, device=out_NHD.device)
    lse[_find_places_HN(call.queries, num_heads)] = lse_HN
    greatest = lse.view(num_rows, num_heads, 1).expand(-1, -1, _COPIES).contiguous()
    found = _import_operators().npu_fusion_attention_grad(
        *inputs,
        grad_out_NHD,
        num_heads,
        "TND",
        softmax_max=greatest,
        softmax_sum=torch.ones_like(greatest),
        attention_in=out_NHD,
        scale_value=call.scale,
        **_list_options(call, out_NHD.device),
    )
    return list(found[:3])


KERNELS = Kernels(attend, differentiate)


def _import_operators() -> Any:
    import torch_npu

    return torch_npu


def _list_options(call: VarlenCall, device: torch.device) -> dict[str, Any]:
    """Return the arguments that say which keys a row sees."""
    ends = {"actual_seq_qlen": call.queries.ends, "actual_seq_kvlen": call.keys.ends}
    return {**ends, "atten_mask": _causal_mask(device), "sparse_mode": _BOTTOM_RIGHT} if call.is_causal else ends


@functools.cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    """Make the mask of hidden keys, which the operators align to the bottom right of each sequence."""
    return torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool, device=device).triu(1)


def _find_places_HN(queries: SequenceOffsets, num_heads: int) -> torch.Tensor:
    """Find the operators' place of each head and row: a sequence's heads follow each other, each with all its rows."""
    offsets_S = queries.offsets_S.long()
    lengths_S = offsets_S.diff()
    num_rows = queries.num_rows
    first_N, length_N = (
        numbers_S.repeat_interleave(lengths_S, output_size=num_rows) for numbers_S in (offsets_S[:-1], lengths_S)
    )
    row_N = torch.arange(num_rows, device=offsets_S.device)
    head_H1 = torch.arange(num_heads, device=offsets_S.device).unsqueeze(1)
    return first_N * num_heads + head_H1 * length_N + (row_N - first_N)
