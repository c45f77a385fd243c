"""Sinks: a logit of each head that takes a share of every softmax, and has no value.

A backend computes attention and the logarithm of each denominator without sinks. Sinks enter both once, after
all parts of a softmax are merged. A backward that gets both with sinks computes the gradients of queries, keys and
values as if nothing had been added, because it needs weights and outputs of the whole softmax. Only the gradient of
sinks is computed here: a sink has a weight like a key's, and a value of zero.

Letters: T tokens, H query heads, V width of a value's head.
"""

import torch


def add_sinks(
    out_THV: torch.Tensor, lse_TH: torch.Tensor, sinks_H: torch.Tensor, unit: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and the logarithms of denominators with sinks; `unit` is the natural logarithm of their base."""
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
    """Compute the gradient of sinks from attention and denominators with sinks."""
    wide = _widen(out_THV.dtype)
    deltas_TH = (grad_out_THV.to(wide) * out_THV.to(wide)).sum(-1)
    weights_TH = torch.exp(sinks_H.to(lse_TH.dtype) - lse_TH * unit)
    return -(weights_TH * deltas_TH).sum(0).to(sinks_H.dtype)


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
