"""The gated delta rule over a forest of segments: the attention of linear layers, whose state is one matrix a head.

A token decays the state of its predecessor, corrects what the state holds for its key, and reads the state with its
query. The first token of a segment has the last token above it as predecessor. So a prompt is computed once, its final
state begins each of its responses, and the gradients of the responses come back into it.

Letters: T tokens, G key heads, H value heads, D dimensions of a query and a key, V of a value.
"""

import importlib
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_rl.ops.backends import Backends, Conditions, Example, HasRefusal
from megatron_rl.ops.shared_prompt.layout import Layout

__all__ = ["BACKENDS", "gated_delta_rule", "prepare"]


class RuleBackend(HasRefusal, Protocol):
    def rule(
        self,
        q_TGD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_THV: torch.Tensor,
        log_decay_TH: torch.Tensor,
        beta_TH: torch.Tensor,
        layout: Layout,
    ) -> torch.Tensor:
        """Compute what each token reads, [T, H, V], from queries and keys of length 1."""

    def prepare(self, layout: Layout) -> object:
        """Make the tables of `rule` on the host; the layout keeps them."""


_CONVOLUTION = "megatron_rl.ops.gated_delta.convolution"
# Added to the square of a vector's length, as models of this kind are trained.
_EPSILON = 1e-6

# The trial's prompts and responses, which end within chunks of 64 rows, and on their edges.
_GROUPS = ((70, (9, 64, 1)), (3, (5, 0)), (64, (65,)))
_RESULTS = (
    "its output", "the gradient of queries", "the gradient of keys", "the gradient of values",
    "the gradient of decays", "the gradient of betas",
)  # fmt: skip


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
    backend = BACKENDS.find(name)
    if len(q_TGD) != layout.num_tokens:
        raise ValueError(f"the number of rows must be the layout's {layout.num_tokens} tokens, not {len(q_TGD)}")
    return backend.rule(_normalize(q_TGD), _normalize(k_TGD), v_THV, log_decay_TH, beta_TH, layout)


def prepare(layout: Layout, window: int, name: str) -> None:
    """Make the tables of linear layers, and of convolutions over windows, on the host."""
    BACKENDS.find(name).prepare(layout)
    layout.once(importlib.import_module(_CONVOLUTION).list_window_rows, window)


def _normalize(vectors_TGD: torch.Tensor) -> torch.Tensor:
    """Scale vectors to length 1, and return them in fp32 at least."""
    wide_TGD = vectors_TGD.to(torch.promote_types(vectors_TGD.dtype, torch.float32))
    squares_TG1 = (wide_TGD * wide_TGD).sum(dim=-1, keepdim=True)
    return wide_TGD * torch.rsqrt(squares_TG1 + _EPSILON)


def compute_log_decay(a_TH: torch.Tensor, log_rate_H: torch.Tensor, bias_H: torch.Tensor) -> torch.Tensor:
    """Compute the logarithm of each token's decay, which is negative, in fp32 at least."""
    wide = torch.promote_types(a_TH.dtype, torch.float32)
    return -log_rate_H.to(wide).exp() * F.softplus(a_TH.to(wide) + bias_H)


def _list_examples(conditions: Conditions) -> Iterator[Example]:
    """Yield the rule for one key head with its value heads."""
    linear, dtype = conditions.linear, conditions.dtype
    assert linear is not None
    layout, generator = Layout.of_groups(_GROUPS), torch.Generator().manual_seed(0)
    copies = linear.num_value_heads // linear.num_key_heads
    key_dim, value_dim = linear.key_head_dim, linear.value_head_dim
    shapes = ((1, key_dim), (1, key_dim), (copies, value_dim), (copies, value_dim), (copies,), (copies,))
    q, k, v, grad, decays, betas = (torch.randn(layout.num_tokens, *shape, generator=generator) for shape in shapes)
    grad, heads = grad.to(dtype), [tensor.to(dtype) for tensor in (q, k, v)]
    factors = [-F.softplus(2 * decays - 2), betas.sigmoid()]

    def compute(name: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        # The definition in half precision has no number in fp32.
        wide = dtype if name == "naive" else torch.promote_types(dtype, torch.float32)
        converted = (*(one.to(device, dtype) for one in heads), *(one.to(device, wide) for one in factors))
        leaves = [one.requires_grad_() for one in converted]
        q_TGD, k_TGD, v_THV, log_decay_TH, beta_TH = leaves
        out_THV = gated_delta_rule(q_TGD, k_TGD, v_THV, log_decay_TH, beta_TH, layout, name)
        return [out_THV, *torch.autograd.grad(out_THV, leaves, grad.to(device, out_THV.dtype))]

    yield Example("linear layers", _RESULTS, compute, f"heads of {key_dim}, ")


BACKENDS: Backends[RuleBackend] = Backends(
    "--linear-attention-backend",
    {"flash-linear": "megatron_rl.ops.gated_delta.flash_linear", "torch": "megatron_rl.ops.gated_delta.chunks"},
    orders={"cuda": ("flash-linear", "torch")},
    elsewhere=("torch",),
    definition="naive",
    list_examples=_list_examples,
    is_used=lambda conditions: conditions.linear is not None,
    others={"naive": "megatron_rl.ops.gated_delta.naive"},
)
