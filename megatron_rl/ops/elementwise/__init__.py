"""The element-wise work of a layer beside its products: SwiGLU, and a residual's addition with the norm after it.

A backend says how it is done: `torch` as megatron does it, in torch's operations; `triton` in one kernel a pass, which
reads and writes each tensor once.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from megatron_rl.ops import adam
from megatron_rl.ops.backends import Backends, Conditions, Example, HasRefusal
from megatron_rl.ops.elementwise import plain
from megatron_rl.ops.linear import linear

__all__ = ["BACKENDS", "ElementwiseBackend"]


class ElementwiseBackend(HasRefusal, Protocol):
    """The functions of a backend, which `plain` defines."""

    def swiglu(self, gate_up_N2F: torch.Tensor) -> torch.Tensor: ...

    def weighted_swiglu(self, gate_up_N2F: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor: ...

    def add_and_normalize(
        self, one_NE: torch.Tensor, other_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


# The trial's columns end within a program, and several programs of a gradient divide its rows.
_NUM_ROWS, _WIDTH = 37, 1_160
_EPS = 1e-6


def _list_examples(conditions: Conditions) -> Iterator[Example]:
    """Yield Adam's steps, and each operation of a layer."""
    yield from adam.list_examples()
    make = functools.partial(_make_example, conditions.dtype)
    gates, rows = (_NUM_ROWS, 2 * _WIDTH), (_NUM_ROWS, _WIDTH)
    yield make("SwiGLU", lambda module: module.swiglu, {"gates": gates}, "its output")
    operands = {"gates": gates, "weights": (_NUM_ROWS,)}
    yield make("SwiGLU of experts", lambda module: module.weighted_swiglu, operands, "its output")
    operands = {"rows": rows, "the residual": rows, "the weight": (_WIDTH,)}
    yield make(
        "a residual with its norm",
        lambda module: functools.partial(module.add_and_normalize, eps=_EPS),
        operands,
        "the sum",
        "its norm",
    )
    operands = {"rows": (_NUM_ROWS, 1, 48), "the weight": (40, 48), "the bias": (40,)}
    yield make(
        "a linear layer",
        lambda module: torch.nn.functional.linear if module is plain else linear,
        operands,
        "its output",
    )


def _make_example(
    dtype: torch.dtype,
    work: str,
    find_operation: Callable[[Any], Callable[..., Any]],
    operands: dict[str, tuple[int, ...]],
    *results: str,
) -> Example:
    """Make an example of an operation that is found in a backend's module, with these shapes of its operands."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in operands.values()]

    def compute(name: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
        found = find_operation(BACKENDS.find(name))(*leaves)
        found = found if isinstance(found, tuple) else (found,)
        weights = [torch.sin(torch.arange(one.numel(), dtype=torch.float64) + 1).reshape(one.shape) for one in found]
        return [*found, *torch.autograd.grad(found, leaves, [weight.to(device, dtype) for weight in weights])]

    return Example(work, (*results, *(f"the gradient of {operand}" for operand in operands)), compute)


BACKENDS: Backends[ElementwiseBackend] = Backends(
    "--elementwise-backend",
    {"triton": "megatron_rl.ops.elementwise.triton_fused", "torch": plain},
    orders={"cuda": ("triton", "torch")},
    # On a CPU the kernels only run in Triton's interpreter, as a test.
    elsewhere=("torch",),
    definition="torch",
    list_examples=_list_examples,
    untried=("torch",),
)
