"""What a backend of shared-prompt attention is, and when it can run. Each backend is a module beside this one."""

import dataclasses
from collections.abc import Callable

import torch

from megatron_rl.ops.shared_prompt.layout import Layout

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float, int | None], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Conditions:
    """The conditions that a backend must run under."""

    device: str
    """The type of a torch.device."""
    dtype: torch.dtype
    window: int | None = None
    head_dim: int | None = None
    """The width of a head; None for one that every backend has room for."""

    @property
    def is_half(self) -> bool:
        """Whether the dtype is one that flash kernels are written for."""
        return self.dtype in (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation."""

    attention: Attention
    prepare: Callable[[Layout, torch.device], object]
    """Prepares what `attention` looks up of a layout; it is kept with the layout, so only the first call costs time."""
    refusal: Callable[[Conditions], str | None]
    """Why it cannot run; None if it can."""


def attend_to_nothing(q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
    """Return attention over no tokens: empty like its queries, and part of the autograd graph of all three inputs."""
    return q_THD + 0 * (k_TGD.sum() + v_TGD.sum())


def make_rows_dense(tensor_THD: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its rows contiguous in memory, as kernels read them."""
    return tensor_THD if tensor_THD.stride(-1) == 1 else tensor_THD.contiguous()
