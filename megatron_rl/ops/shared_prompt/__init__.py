"""Attention in which the responses of a group share one copy of their prompt."""

import dataclasses
from collections.abc import Sequence

import torch

from megatron_rl.errors import UsageError
from megatron_rl.ops.choice import Choice, choose_by_flag
from megatron_rl.ops.shared_prompt.backends import (
    Backend,
    Conditions,
    cudnn,
    flash_attention,
    gather,
    invariant,
    merge,
    naive,
    triton_fused,
)
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.shared_prompt.measured import Measured

__all__ = [
    "BACKENDS",
    "Choice",
    "Conditions",
    "choose_backend",
    "find_backend",
    "list_order",
    "shared_prompt_attention",
]

# `auto` takes the first backend that can run. They are ordered by their times on a CPU in docs/kernels.md.
BACKENDS: dict[str, Backend] = {
    "merge": Backend(merge.attention, merge.prepare, merge.refusal),
    "gather": Backend(gather.attention, gather.prepare, gather.refusal),
    "triton": Backend(triton_fused.attention, triton_fused.prepare, triton_fused.refusal),
    "flash": Backend(flash_attention.attention, flash_attention.prepare, flash_attention.refusal),
    "cudnn": Backend(cudnn.attention, cudnn.prepare, cudnn.refusal),
    "naive": Backend(naive.attention, naive.prepare, lambda conditions: None),
}
# Those that another flag than --shared-prompt-backend asks for: --batch-invariant.
_OTHERS = {"invariant": Backend(invariant.attention, invariant.prepare, invariant.refusal)}
# Other orders of `auto`, by the times on an H200 in docs/kernels.md. `flash` has not been timed, and `cudnn`, which
# has not run on a GPU, is in none.
_ORDERS = {"cuda": ("triton", "gather", "merge", "flash", "naive")}


def find_backend(name: str) -> Backend:
    """Return the backend with this name."""
    backend = BACKENDS.get(name) or _OTHERS.get(name)
    if backend is None:
        raise UsageError(f"--shared-prompt-backend {name} does not exist: write one of auto, {', '.join(BACKENDS)}")
    return backend


def list_order(device: str) -> Sequence[str]:
    """Return the backends that `auto` takes on this type of device, the fastest first."""
    return _ORDERS.get(device, tuple(BACKENDS))


def choose_backend(name: str, conditions: Conditions, measured: Measured | None = None) -> Choice:
    """Choose the named backend, or the fastest with `auto`; raise a UsageError if the named one cannot run.

    The fastest are those that were measured for such groups, and then those of the general order.
    """
    timed = [one for one in measured.fastest_first if one in BACKENDS] if measured is not None else []
    order = dict.fromkeys((*timed, *list_order(conditions.device)))
    choice = choose_by_flag("--shared-prompt-backend", name, order, lambda one: find_backend(one).refusal(conditions))
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
    return find_backend(backend_name).attention(q_THD, k_TGD, v_TGD, layout, scale, window, sinks_H)
