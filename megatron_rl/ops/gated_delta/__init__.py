"""The gated delta rule over a forest of segments: the attention of linear layers, whose state is one matrix a head.

A token decays the state of its predecessor, corrects what the state holds for its key, and reads the state with its
query. The first token of a segment has the last token above it as predecessor. So a prompt is computed once, its final
state begins each of its responses, and the gradients of the responses come back into it.

Letters: T tokens, G key heads, H value heads, D dimensions of a query and a key, V of a value.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron_rl.errors import UsageError
from megatron_rl.ops.choice import Choice, choose_by_flag
from megatron_rl.ops.gated_delta import chunks, flash_linear, naive
from megatron_rl.ops.shared_prompt.layout import Layout

__all__ = ["BACKENDS", "choose_backend", "gated_delta_rule", "prepare"]

BACKENDS = ("flash-linear", "torch")
_Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]
_RULES: dict[str, _Rule] = {"flash-linear": flash_linear.rule, "torch": chunks.rule, "naive": naive.rule}
# `auto` takes the first that can run.
_ORDERS = {"cuda": BACKENDS}
# Added to the square of a vector's length, as models of this kind are trained.
_EPSILON = 1e-6


def choose_backend(name: str, device: str, dtype: torch.dtype) -> Choice:
    """Choose the named backend, or the fastest with `auto`; raise a UsageError if the named one cannot run."""
    return choose_by_flag(
        "--linear-attention-backend",
        name,
        _ORDERS.get(device, ("torch",)),
        lambda one: flash_linear.refusal(device, dtype) if one == "flash-linear" else None,
    )


def prepare(name: str, layout: Layout) -> object:
    """Make the tables of a backend for the layout, which keeps them; they are on the host."""
    return flash_linear.prepare(layout) if name == "flash-linear" else chunks.prepare(layout)


def gated_delta_rule(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    layout: Layout,
    name: str = "torch",
) -> torch.Tensor:
    """Compute what each token reads, [T, H, V], in the dtype of values.

    Queries and keys are scaled to length 1, and queries also by D ** -0.5. Each key head belongs to H / G value heads
    in a row. `log_decay_TH` is the logarithm of the factor by which a token decays the state; it is in fp32 at least.
    """
    if name not in _RULES:
        raise UsageError(f"--linear-attention-backend {name} does not exist: write one of auto, {', '.join(BACKENDS)}")
    if len(q_TGD) != layout.num_tokens:
        raise ValueError(f"the number of rows must be the layout's {layout.num_tokens} tokens, not {len(q_TGD)}")
    return _RULES[name](_normalize(q_TGD), _normalize(k_TGD), v_THV, log_decay_TH, beta_TH, layout)


def _normalize(vectors_TGD: torch.Tensor) -> torch.Tensor:
    """Scale vectors to length 1, and return them in fp32 at least."""
    wide_TGD = vectors_TGD.to(torch.promote_types(vectors_TGD.dtype, torch.float32))
    squares_TG1 = (wide_TGD * wide_TGD).sum(dim=-1, keepdim=True)
    return wide_TGD * torch.rsqrt(squares_TG1 + _EPSILON)


def compute_log_decay(a_TH: torch.Tensor, log_rate_H: torch.Tensor, bias_H: torch.Tensor) -> torch.Tensor:
    """Compute the logarithm of each token's decay, which is negative, in fp32 at least."""
    wide = torch.promote_types(a_TH.dtype, torch.float32)
    return -log_rate_H.to(wide).exp() * F.softplus(a_TH.to(wide) + bias_H)
