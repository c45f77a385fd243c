"""The parts of a backend of shared-prompt attention. Each backend is a module in this folder."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_rl.ops.backends import HasRefusal
from megatron_rl.ops.shared_prompt.layout import Layout


class AttentionBackend(HasRefusal, Protocol):
    def attention(
        self,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGV: torch.Tensor,
        layout: Layout,
        scale: float,
        window: int | None = None,
        sinks_H: torch.Tensor | None = None,
        /,
    ) -> torch.Tensor:
        """Return the output, [T, H, V]."""

    def prepare(self, layout: Layout, device: torch.device, window: int | None = None) -> object:
        """Make the tables of `attention` for that device and window, on the host; the layout keeps them."""


def attend_to_nothing(
    q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, sinks_H: torch.Tensor | None = None
) -> torch.Tensor:
    """Return attention over no tokens: empty, and in the autograd graph of all inputs."""
    num_heads, width = q_THD.shape[1], v_TGD.shape[2]
    total = q_THD.sum() + k_TGD.sum() + v_TGD.sum()
    if sinks_H is not None:
        total = total + sinks_H.sum().to(total.dtype)
    return q_THD.new_zeros(0, num_heads, width) + 0 * total


def attend_with_equal_widths(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGV: torch.Tensor,
) -> torch.Tensor:
    """Attend by an operator that has one width for all heads: the narrower heads get columns of zeros.

    Such columns add nothing to a score, and those of the output are cut off.
    """
    widths = q_THD.shape[-1], v_TGV.shape[-1]
    if widths[0] == widths[1]:
        return attend(q_THD, k_TGD, v_TGV)
    padded = (F.pad(tensor, (0, max(widths) - tensor.shape[-1])) for tensor in (q_THD, k_TGD, v_TGV))
    return attend(*padded)[..., : widths[1]]


def make_rows_dense(tensor_THD: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its rows contiguous in memory, as kernels read them."""
    return tensor_THD if tensor_THD.stride(-1) == 1 else tensor_THD.contiguous()


def add_sinks(
    out_THV: torch.Tensor, lse_TH: torch.Tensor, sinks_H: torch.Tensor, unit: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and the logarithms of denominators with sinks; `unit` is the natural logarithm of their base.

    This is done once, after all parts of a softmax are merged. A backward that gets both with sinks computes the
    gradients of queries, keys and values as if there were none: it needs weights and outputs of the whole softmax.
    """
    without_TH = lse_TH * unit
    with_TH = torch.logaddexp(without_TH, sinks_H.to(without_TH.dtype))
    share_TH1 = torch.exp(without_TH - with_TH).unsqueeze(-1)
    return (out_THV.to(_widen(out_THV.dtype)) * share_TH1).to(out_THV.dtype), with_TH / unit


def differentiate_sinks(
    grad_out_THV: torch.Tensor,
    out_THV: torch.Tensor,
    lse_TH: torch.Tensor,
    sinks_H: torch.Tensor,
    unit: float = 1.0,
) -> torch.Tensor:
    """Compute the gradient of sinks from both with sinks: a sink has a weight like a key's, and a value of zero."""
    wide = _widen(out_THV.dtype)
    deltas_TH = (grad_out_THV.to(wide) * out_THV.to(wide)).sum(-1)
    weights_TH = torch.exp(sinks_H.to(lse_TH.dtype) - lse_TH * unit)
    return -(weights_TH * deltas_TH).sum(0).to(sinks_H.dtype)


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
