"""The element-wise work of a layer beside its products: SwiGLU, and a residual's addition with the norm after it.

A backend says how it is done: `torch` as megatron does it, in torch's operations; `triton` in one kernel a pass, which
reads and writes each tensor once.
"""

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from megatron_rl.ops import adam, trials
from megatron_rl.ops.backends import Backends, FunctionBackend
from megatron_rl.ops.elementwise import plain, triton_fused
from megatron_rl.ops.linear import linear

__all__ = ["BACKENDS", "check_backend"]

BACKENDS: Backends[FunctionBackend[ModuleType]] = Backends(
    "--elementwise-backend",
    {"triton": FunctionBackend(triton_fused, triton_fused.refusal), "torch": FunctionBackend(plain)},
    orders={"cuda": ("triton", "torch")},
    # On a CPU the kernels only run in Triton's interpreter, as a test.
    elsewhere=("torch",),
)

# The trial's columns end within a program, and several programs of a gradient divide its rows.
_NUM_ROWS, _WIDTH = 37, 1_160
_EPS = 1e-6

_Operation = Callable[..., Any]


def check_backend(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a PlatformError if the backend does not compute a layer's element-wise work on this device."""
    adam.check_device(device)
    generator = torch.Generator().manual_seed(0)
    for what, define, compute, operands, results in _list_operations(BACKENDS.find(name).run):
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in operands.values()]
        names = (*results, *(f"the gradient of {operand}" for operand in operands))
        trials.check(
            f"--elementwise-backend {name} does not compute {what}", names,
            functools.partial(_differentiate, compute, inputs), functools.partial(_differentiate, define, inputs),
            device, dtype, "torch instead",
        )  # fmt: skip


def _list_operations(
    module: ModuleType,
) -> Iterator[tuple[str, _Operation, _Operation, dict[str, tuple[int, ...]], tuple[str, ...]]]:
    """Yield each operation's name, its definition, its kernels, its operands with their shapes, and its results."""
    gates, rows, weight = (_NUM_ROWS, 2 * _WIDTH), (_NUM_ROWS, _WIDTH), (_WIDTH,)
    yield "SwiGLU", plain.swiglu, module.swiglu, {"gates": gates}, ("its output",)
    operands = {"gates": gates, "weights": (_NUM_ROWS,)}
    yield "SwiGLU of experts", plain.weighted_swiglu, module.weighted_swiglu, operands, ("its output",)
    norms = (functools.partial(one.add_and_normalize, eps=_EPS) for one in (plain, module))
    operands = {"rows": rows, "the residual": rows, "the weight": weight}
    yield "a residual with its norm", *norms, operands, ("the sum", "its norm")
    operands = {"rows": (_NUM_ROWS, 1, 48), "the weight": (40, 48), "the bias": (40,)}
    yield "a linear layer", torch.nn.functional.linear, linear, operands, ("its output",)


def _differentiate(
    operation: _Operation, inputs: list[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return results and gradients."""
    operands = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
    results = operation(*operands)
    results = results if isinstance(results, tuple) else (results,)
    weights = [torch.sin(torch.arange(one.numel(), dtype=torch.float64) + 1).reshape(one.shape) for one in results]
    return [*results, *torch.autograd.grad(results, operands, [weight.to(device, dtype) for weight in weights])]
