"""The parts of a backend of shared-prompt attention, and its conditions. Each backend is a module in this folder."""

import dataclasses
from collections.abc import Callable

import torch

from megatron_rl.ops.shared_prompt.layout import Layout

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float, int | None], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions that a backend must run under."""

    device: str
    """The type of a torch.device, such as `cuda`."""
    dtype: torch.dtype
    window: int | None = None
    head_dim: int | None = None
    """The width of a head; None for a width that every backend supports."""

    @property
    def is_half(self) -> bool:
        """Whether flash kernels are written for the dtype."""
        return self.dtype in (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of shared-prompt attention."""

    attention: Attention
    prepare: Callable[[Layout, torch.device], object]
    """The function that makes `attention`'s tables for that device. They are on the host; the layout keeps them."""
    refusal: Callable[[Conditions], str | None]
    """The function that returns why the backend cannot run, or None if it can."""


def attend_to_nothing(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
    """Return attention over no tokens: empty as the queries, and in the autograd graph of all three inputs."""
    return q_THD + 0 * (k_TGD.sum() + v_TGD.sum())


def make_rows_dense(tensor_THD: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its rows contiguous in memory, as kernels read them."""
    return tensor_THD if tensor_THD.stride(-1) == 1 else tensor_THD.contiguous()
