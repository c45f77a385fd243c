"""The element-wise work of a layer beside its products: SwiGLU, and a residual's addition with the norm after it.

A backend says how it is done: `torch` as megatron does it, in torch's operations; `triton` in one kernel a pass, which
reads and writes each tensor once.
"""

import torch

from megatron_rl.ops.choice import Choice, choose_by_flag
from megatron_rl.ops.elementwise import triton_fused

__all__ = ["BACKENDS", "choose_backend"]

BACKENDS = ("triton", "torch")
# `auto` takes the first that can run. On a CPU the kernels only run in Triton's interpreter, as a test.
_ORDERS = {"cuda": BACKENDS}


def choose_backend(name: str, device: str, dtype: torch.dtype, hidden_size: int) -> Choice:
    """Choose the named backend, or the fastest with `auto`; raise a UsageError if the named one cannot run.

    `device` is the type of a torch.device, such as `cuda`.
    """

    def refuse(one: str) -> str | None:
        return triton_fused.refusal(device, dtype, hidden_size) if one == "triton" else None

    return choose_by_flag("--elementwise-backend", name, _ORDERS.get(device, ("torch",)), refuse)
