"""Shared-prompt attention by merging, as in `merge`, with the kernels of the package flash-attn.

The package's public functions drop the gradient of the softmax's denominator. The private functions that they call
accept the merged denominator, so they are called here.

Letters: T tokens, N rows of queries, M rows of keys, H query heads, G key-value heads, D head dimension.
"""

import importlib.util
from typing import Any

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt.backends import merge
from megatron_rl.ops.shared_prompt.backends.flash_varlen import Kernels, SequenceOffsets, VarlenFlash
from megatron_rl.ops.shared_prompt.layout import Layout

# The kernels' value for "no window", on either side.
_ALL = -1


def refusal(conditions: Conditions) -> str | None:
    """Refuse the conditions that `merge` refuses, other devices than CUDA, and a missing package."""
    if conditions.device != "cuda":
        return f"flash-attn has no kernels for {conditions.device}"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    return merge.refusal(conditions)


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> VarlenFlash:
    """Return the calls that compute attention over the layout."""
    return layout.once(VarlenFlash.of, KERNELS)


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `naive.attention`, without a window."""
    assert window is None
    return merge.attend_and_merge(q_THD, k_TGD, v_TGD, layout, scale, sinks_H, VarlenFlash.of, KERNELS)


def attend(
    q_NHD: torch.Tensor,
    k_MGD: torch.Tensor,
    v_MGD: torch.Tensor,
    queries: SequenceOffsets,
    keys: SequenceOffsets,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention, and the logarithm of each softmax's denominator [H, N]."""
    out_NHD, lse_HN, *_ = _import_interface()._flash_attn_varlen_forward(
        q_NHD,
        k_MGD,
        v_MGD,
        queries.offsets_S,
        keys.offsets_S,
        queries.longest,
        keys.longest,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=is_causal,
    )
    return out_NHD, lse_HN


def gradients(
    grad_out_NHD: torch.Tensor,
    q_NHD: torch.Tensor,
    k_MGD: torch.Tensor,
    v_MGD: torch.Tensor,
    out_NHD: torch.Tensor,
    lse_HN: torch.Tensor,
    queries: SequenceOffsets,
    keys: SequenceOffsets,
    is_causal: bool,
    scale: float,
) -> list[torch.Tensor]:
    """Compute gradients of queries, keys and values, with sums in a fixed order."""
    found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q_NHD, k_MGD, v_MGD)]
    _import_interface()._flash_attn_varlen_backward(
        grad_out_NHD,
        q_NHD,
        k_MGD,
        v_MGD,
        out_NHD,
        lse_HN,
        *found,
        queries.offsets_S,
        keys.offsets_S,
        queries.longest,
        keys.longest,
        dropout_p=0.0,
        softmax_scale=scale,
        causal=is_causal,
        window_size_left=_ALL,
        window_size_right=_ALL,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=True,
    )
    return found


KERNELS = Kernels(attend, gradients)


def _import_interface() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface
