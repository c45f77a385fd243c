"""Attention in which the responses of a group share one copy of their prompt."""

from collections.abc import Callable

import torch

from megatron_rl.errors import UsageError
from megatron_rl.ops.shared_prompt import naive
from megatron_rl.ops.shared_prompt.layout import Layout

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float, int | None], torch.Tensor]

BACKENDS: dict[str, Backend] = {"naive": naive.attention}


def backend(name: str) -> Backend:
    """The implementation of that name."""
    if name not in BACKENDS:
        raise UsageError(f"--shared-prompt-backend {name} does not exist: choose one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def shared_prompt_attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    backend_name: str = "naive",
) -> torch.Tensor:
    """Attention over one packed buffer: T tokens, H query heads, G key-value heads, D head dimension."""
    if q_THD.shape[0] != layout.num_tokens:
        raise ValueError(f"{q_THD.shape[0]} rows in a layout of {layout.num_tokens} tokens: they must be as many")
    return backend(backend_name)(q_THD, k_TGD, v_TGD, layout, scale, window)
