"""Shared-prompt attention by public functions only: each strand's keys are gathered, and it attends as if alone.

A strand's rows are the last rows of its keys, so the diagonal of its causal mask ends at the bottom right. On an
accelerator in half precision, one call for sequences of varying length has all strands. Otherwise each strand is a call
with a mask. The fast operators have one width for all heads, so narrower values get columns of zeros.

Letters: T tokens, N gathered rows, L rows of a strand, M its keys, H query heads, G key-value heads, D head dimension.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt.backends import attend_to_nothing, attend_with_equal_widths
from megatron_rl.ops.shared_prompt.backends.flash_varlen import SequenceOffsets, VarlenCall, find_kernels
from megatron_rl.ops.shared_prompt.layout import Layout, find_strands
from megatron_rl.ops.shared_prompt.tables import find_tables


@dataclasses.dataclass(frozen=True)
class Gathered:
    """The keys of all strands, strand after strand."""

    rows_N: torch.Tensor
    query_lengths: list[int]
    key_lengths: list[int]
    queries: SequenceOffsets
    keys: SequenceOffsets

    @classmethod
    def of(cls, layout: Layout) -> "Gathered":
        """List the rows to gather."""
        found = find_strands(layout)
        rows = [np.arange(*rows) for strand in found for rows in (*strand.above, strand.rows)]
        query_lengths = [strand.rows.length for strand in found]
        key_lengths = [strand.num_keys for strand in found]
        return cls(
            torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *rows])),
            query_lengths,
            key_lengths,
            SequenceOffsets.of(query_lengths),
            SequenceOffsets.of(key_lengths),
        )


def refusal(conditions: Conditions) -> str | None:
    """Refuse unknown devices, on an NPU a window or full precision, and sinks where one call has all strands."""
    if conditions.device not in ("cpu", "cuda", "npu"):
        return f"it is not known to work on {conditions.device}"
    if conditions.device == "npu" and conditions.window is not None:
        return "on npu it has no sliding window"
    if conditions.device == "npu" and not conditions.is_half:
        return "on npu it needs --bf16 or --fp16"
    if conditions.has_sinks and conditions.device != "cpu" and conditions.is_half:
        return "in half precision it has no sinks"
    return None


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> Gathered:
    """Return the rows to gather for the layout."""
    return layout.once(Gathered.of)


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `naive.attention`."""
    if layout.num_tokens == 0:
        return attend_to_nothing(q_THD, k_TGD, v_TGD, sinks_H)
    gathered = find_tables(layout, q_THD.device, Gathered.of)

    def attend(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        return _attend(q_THD, k_TGD, v_TGD, gathered, scale, window, sinks_H)

    return attend_with_equal_widths(attend, q_THD, k_TGD, v_TGD)


def _attend(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    gathered: Gathered,
    scale: float,
    window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    k_NGD, v_NGD = (tensor_TGD.index_select(0, gathered.rows_N) for tensor_TGD in (k_TGD, v_TGD))
    if q_THD.device.type == "npu":
        assert sinks_H is None
        return _attend_on_npu(q_THD, k_NGD, v_NGD, gathered, scale)
    if q_THD.is_cuda and q_THD.dtype in (torch.float16, torch.bfloat16):
        assert sinks_H is None
        return _attend_in_one_call(q_THD, k_NGD, v_NGD, gathered, scale, window)
    # In fp32 at least: on the CPU, in half precision, torch rounds sums over queries after each block of them.
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    dtype, has_sinks = q_THD.dtype, sinks_H is not None
    q_THD, k_NGD, v_NGD = (tensor.to(wide) for tensor in (q_THD, k_NGD, v_NGD))
    if sinks_H is not None:
        q_THD, k_NGD, v_NGD = _add_sink_column(q_THD, k_NGD, v_NGD, sinks_H.to(wide) / scale)
    out_THD = _attend_by_strand(q_THD, k_NGD, v_NGD, gathered, scale, window, has_sinks).to(dtype)
    return out_THD[..., :-1] if has_sinks else out_THD


def _add_sink_column(
    q_THD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor, sinks_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a column in which queries have their head's sink, and keys and values have zeros."""
    column_TH1 = sinks_H.unsqueeze(-1).expand(len(q_THD), -1, -1)
    return torch.cat((q_THD, column_TH1), dim=-1), F.pad(k_NGD, (0, 1)), F.pad(v_NGD, (0, 1))


def _attend_in_one_call(
    q_THD: torch.Tensor,
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    gathered: Gathered,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    queries, keys = gathered.queries, gathered.keys
    out_THD = varlen_attn(
        q_THD,
        k_NGD,
        v_NGD,
        queries.offsets_S,
        keys.offsets_S,
        queries.longest,
        keys.longest,
        scale=scale,
        # The number of visible tokens to the left of a token; -1 means all.
        window_size=(-1 if window is None else window - 1, 0),
        **declare_grouping(varlen_attn, q_THD, k_NGD),
    )
    assert isinstance(out_THD, torch.Tensor)
    return out_THD


def declare_grouping(varlen_attn: Callable[..., object], q_THD: torch.Tensor, k_NGD: torch.Tensor) -> dict[str, Any]:
    """Tell torch that keys have fewer heads. torch 2.11 has no such argument, and accepts fewer heads without it."""
    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
        return {}
    return {"enable_gqa": q_THD.shape[1] != k_NGD.shape[1]}


def _attend_on_npu(
    q_THD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor, gathered: Gathered, scale: float
) -> torch.Tensor:
    call = VarlenCall(gathered.queries, gathered.keys, True, scale)
    # torch_npu differentiates its operator itself.
    return find_kernels("npu").attend((q_THD, k_NGD, v_NGD), call)[0]


def _attend_by_strand(
    q_THD: torch.Tensor,
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    gathered: Gathered,
    scale: float,
    window: int | None,
    has_sinks: bool = False,
) -> torch.Tensor:
    """Attend strand by strand. A sink is a key before the others, with a one in the last column, which all see."""
    outs = []
    # One split instead of slices, because the gradient of each slice would have the size of the buffer.
    for q_LHD, k_MGD, v_MGD in zip(
        q_THD.split(gathered.query_lengths),
        k_NGD.split(gathered.key_lengths),
        v_NGD.split(gathered.key_lengths),
        strict=True,
    ):
        length, num_keys = len(q_LHD), len(k_MGD)
        is_plain = length == num_keys and (window is None or window >= length) and not has_sinks
        mask_LM = None if is_plain else _make_mask(length, num_keys, window, q_THD.device)
        if has_sinks:
            assert mask_LM is not None
            sink_1GD = F.one_hot(torch.tensor(k_MGD.shape[-1] - 1, device=k_MGD.device), k_MGD.shape[-1])
            sink_1GD = sink_1GD.to(k_MGD.dtype).expand(1, k_MGD.shape[1], -1)
            k_MGD, v_MGD = torch.cat((sink_1GD, k_MGD)), torch.cat((torch.zeros_like(sink_1GD), v_MGD))
            mask_LM = F.pad(mask_LM, (1, 0), value=True)
        q_1HLD, k_1GMD, v_1GMD = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q_LHD, k_MGD, v_MGD))
        out_1HLD = F.scaled_dot_product_attention(
            q_1HLD,
            k_1GMD,
            v_1GMD,
            attn_mask=mask_LM,
            is_causal=is_plain,
            scale=scale,
            enable_gqa=q_LHD.shape[1] != k_MGD.shape[1],
        )
        outs.append(out_1HLD.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def _make_mask(length: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Make the mask of the keys that each row of a strand sees: up to its own, and the last ones with a window."""
    mask_LM = torch.ones(length, num_keys, dtype=torch.bool, device=device).tril(num_keys - length)
    return mask_LM if window is None else mask_LM.triu(num_keys - length - window + 1)
