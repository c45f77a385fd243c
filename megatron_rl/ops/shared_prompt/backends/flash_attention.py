"""Shared-prompt attention by merging, as in `merge`, with the kernels of the package flash-attn.

The package's public functions drop the gradient of the softmax's denominator. The private functions that they call
accept the merged denominator, so they are called here.

Letters: T tokens, N rows of queries, H query heads, G key-value heads, D head dimension.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt.backends import merge
from megatron_rl.ops.shared_prompt.backends.flash_varlen import Kernels, VarlenCall, VarlenFlash
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


def attend(inputs: Sequence[torch.Tensor], call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
    out_NHD, lse_HN, *_ = _import_interface()._flash_attn_varlen_forward(
        *inputs, *call.bounds, dropout_p=0.0, softmax_scale=call.scale, causal=call.is_causal
    )
    return out_NHD, lse_HN


def differentiate(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], call: VarlenCall
) -> list[torch.Tensor]:
    """Compute the gradients, with sums in a fixed order."""
    grad_out_NHD, *results = outputs
    found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
    _import_interface()._flash_attn_varlen_backward(
        grad_out_NHD,
        *inputs,
        *results,
        *found,
        *call.bounds,
        dropout_p=0.0,
        softmax_scale=call.scale,
        causal=call.is_causal,
        window_size_left=_ALL,
        window_size_right=_ALL,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=True,
    )
    return found


KERNELS = Kernels(attend, differentiate)


def _import_interface() -> Any:
    from flash_attn import flash_attn_interface

    return flash_attn_interface
