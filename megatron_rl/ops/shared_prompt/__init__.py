"""Attention in which the responses of a group share one copy of their prompt."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from megatron_rl.ops.backends import Backends, Choice, Conditions, Example
from megatron_rl.ops.shared_prompt.backends import AttentionBackend
from megatron_rl.ops.shared_prompt.layout import Layout

if TYPE_CHECKING:
    from megatron_rl.ops.shared_prompt.measured import Measured

__all__ = ["BACKENDS", "choose_backend", "shared_prompt_attention"]

# The trial's prompts and responses, which end within blocks, and on their edges; and groups of equal lengths, which
# `cudnn` batches. The window is small enough to hide keys of these packs.
_PACKS = (((70, (9, 128, 1)), (3, (5,)), (64, (64, 200))), ((70, (65, 65, 65)), (70, (65, 65, 65))))
_WINDOW = 48
_RESULTS = (
    "its output", "the gradient of queries", "the gradient of keys", "the gradient of values", "the gradient of sinks",
)  # fmt: skip


def choose_backend(name: str, conditions: Conditions, measured: "Measured | None" = None) -> Choice:
    """Choose as `Backends.choose` does; the fastest were measured for such groups, then comes the general order."""
    timed = [name for name in measured.fastest_first if name in BACKENDS] if measured is not None else []
    choice = BACKENDS.choose(name, conditions, timed)
    if name != "auto" or choice.name not in timed:
        return choice
    (note,) = choice.notes
    return dataclasses.replace(choice, notes=(f"{note}; the nearest measured group is {measured}",))


def shared_prompt_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    backend_name: str = "naive",
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention over one packed buffer: T tokens, H query heads, G key-value heads, D head dimension.

    Values, and so the output, may have another width than queries and keys. With a window, a token sees the last
    `window` positions of its path, its own among them. A sink is one more logit of each softmax of its head, which has
    no value.
    """
    if q_THD.shape[0] != layout.num_tokens:
        raise ValueError(f"the number of rows must be the layout's {layout.num_tokens} tokens, not {q_THD.shape[0]}")
    return BACKENDS.find(backend_name).attention(q_THD, k_TGD, v_TGD, layout, scale, window, sinks_H)


def _list_examples(conditions: Conditions) -> Iterator[Example]:
    """Yield attention over each pack, with a window too if there is one."""
    # One head of keys and values with its queries, since kernels compute such heads one by one.
    queries, head_dim = conditions.queries, conditions.head_dim
    assert head_dim is not None
    value_dim = conditions.value_dim or head_dim
    shapes = ((queries, head_dim), (1, head_dim), (1, value_dim), (queries, value_dim))
    windows = [None] if conditions.window is None else [None, min(conditions.window, _WINDOW)]
    for window, groups in itertools.product(windows, _PACKS):
        layout, generator = Layout.of_groups(groups), torch.Generator().manual_seed(0)
        *inputs, grad = (torch.randn(layout.num_tokens, *shape, generator=generator) for shape in shapes)
        if conditions.has_sinks:
            inputs.append(torch.linspace(-1, 2, queries))
        inputs, grad = [tensor.to(conditions.dtype) for tensor in inputs], grad.to(conditions.dtype)
        compute = functools.partial(_differentiate, layout=layout, inputs=inputs, grad=grad, window=window)
        yield Example("attention", _RESULTS[: 1 + len(inputs)], compute, f"heads of {head_dim}, ")


def _differentiate(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    layout: Layout,
    inputs: list[torch.Tensor],
    grad: torch.Tensor,
    window: int | None,
) -> list[torch.Tensor]:
    leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
    q_THD, k_TGD, v_TGD, *sinks = leaves
    out_THD = BACKENDS.find(name).attention(q_THD, k_TGD, v_TGD, layout, q_THD.shape[-1] ** -0.5, window, *sinks)
    return [out_THD, *torch.autograd.grad(out_THD, leaves, grad.to(device, dtype))]


# They are ordered by their times on a CPU in docs/kernels.md.
_BACKENDS: dict[str, AttentionBackend | str] = {
    "merge": "megatron_rl.ops.shared_prompt.backends.merge",
    "gather": "megatron_rl.ops.shared_prompt.backends.gather",
    "triton": "megatron_rl.ops.shared_prompt.backends.triton_fused",
    "flash": "megatron_rl.ops.shared_prompt.backends.flash_attention",
    "cudnn": "megatron_rl.ops.shared_prompt.backends.cudnn",
    "naive": "megatron_rl.ops.shared_prompt.backends.naive",
}
BACKENDS: Backends[AttentionBackend] = Backends(
    "--shared-prompt-backend",
    _BACKENDS,
    # By the times on an H200 in docs/kernels.md. `flash` has not been timed, and `cudnn`, which has not run on a GPU,
    # has no place.
    orders={"cuda": ("triton", "gather", "merge", "flash", "naive")},
    elsewhere=tuple(_BACKENDS),
    definition="naive",
    list_examples=_list_examples,
    # For --batch-invariant.
    others={"invariant": "megatron_rl.ops.shared_prompt.backends.invariant"},
)
