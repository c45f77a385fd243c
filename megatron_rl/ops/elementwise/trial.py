"""The trial of a backend on small numbers before training: results and gradients beside float64's."""

from collections.abc import Callable, Iterator

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops import adam
from megatron_rl.ops.elementwise import plain, triton_fused
from megatron_rl.ops.linear import linear

# A kernel rounds and sums in another order. So its distance from the truth may be this factor times the distance of
# torch's operations in the same precision, plus these units in the last place of the largest number.
_FACTOR, _UNITS = 3, 2
# Columns that end within a program, and rows that several programs of a gradient divide.
_NUM_ROWS, _WIDTH = 37, 1_160
_EPS = 1e-6

Operation = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def check_backend(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise a PlatformError if the backend does not compute a layer's element-wise work on this device."""
    if name == "torch":
        return
    adam.check_device(device)
    generator = torch.Generator().manual_seed(0)
    for what, plainly, found, shapes in _list_operations():
        given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        host = torch.device("cpu")
        exact, rounded = (_compute(plainly, given, host, one) for one in (torch.float64, dtype))
        # The second time, kernels are launched as in every later step (`ops.kept_launches`).
        _, ours = (_compute(found, given, device, dtype) for _ in range(2))
        for truth, of_torch, of_backend in zip(exact, rounded, ours, strict=True):
            largest = truth.abs().max()
            bound = (_FACTOR * (of_torch - truth).abs().max() / largest).item() + _UNITS * torch.finfo(dtype).eps
            distance = ((of_backend - truth).abs().max() / largest).item()
            # Written so that NaN raises too.
            if not distance <= bound:
                raise PlatformError(
                    f"--elementwise-backend {name} does not compute {what} on {device.type}: it is off by "
                    f"{distance:g} of the largest, and rounding explains {bound:g} ({dtype}). Write torch instead, and "
                    "please report this with the output of megatron-rl doctor"
                )


def _list_operations() -> Iterator[tuple[str, Operation, Operation, list[tuple[int, ...]]]]:
    """Yield each operation's name, its definition, its kernels, and the shapes of its operands."""
    yield "SwiGLU", plain.swiglu, triton_fused.swiglu, [(_NUM_ROWS, 2 * _WIDTH)]
    shapes = [(_NUM_ROWS, 2 * _WIDTH), (_NUM_ROWS,)]
    yield "SwiGLU of experts", plain.weighted_swiglu, triton_fused.weighted_swiglu, shapes
    shapes = [(_NUM_ROWS, _WIDTH), (_NUM_ROWS, _WIDTH), (_WIDTH,)]
    yield "a residual with its norm", _normalize(plain), _normalize(triton_fused), shapes
    yield "a linear layer", torch.nn.functional.linear, linear, [(_NUM_ROWS, 1, 48), (40, 48), (40,)]


def _normalize(module: object) -> Operation:
    return lambda *operands: module.add_and_normalize(*operands, _EPS)  # type: ignore[attr-defined,no-any-return]


def _compute(
    operation: Operation, given: list[torch.Tensor], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return results and gradients, in float64 on the host."""
    operands = [tensor.to(device, dtype).requires_grad_() for tensor in given]
    results = operation(*operands)
    results = results if isinstance(results, tuple) else (results,)
    weights = [torch.sin(torch.arange(one.numel(), dtype=torch.float64) + 1).reshape(one.shape) for one in results]
    grads = [weight.to(device, dtype) for weight in weights]
    found = (*results, *torch.autograd.grad(results, operands, grads))
    return [tensor.detach().to("cpu", torch.float64) for tensor in found]
