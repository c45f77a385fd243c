"""Products that are added to a sum in the product itself, as weight gradients are to main gradients.

Megatron's gradient buffers give each parameter a `main_grad`, into which a hook adds the gradient of autograd. A
function that has added its gradient itself says so in `grad_added_to_main_grad`, and the hook adds nothing. A parameter
of which other uses have gradients that the hook must add has the mark `zero_out_wgrad`, as tied embeddings do.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron_rl.ops import trials

_log = logging.getLogger(__name__)

_NUM_ROWS, _INPUT_SIZE, _OUTPUT_SIZE = 77, 48, 40


def add_weight_gradient(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the gradient of a linear layer's weight, as apex's `wgrad_gemm_accum_fp32` and `wgrad_gemm_accum_fp16` do."""
    grad_NO, input_NI = (tensor.flatten(0, -2) for tensor in (grad_output, input))
    add_product(main_grad, grad_NO.t(), input_NI)


def find_main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the main gradient of a parameter, into which a function may add; None if there is none."""
    return getattr(weight, "main_grad", None) if hasattr(weight, "grad_added_to_main_grad") else None


def mark_as_added(weight: Any) -> torch.Tensor | None:
    """Say that a weight's whole gradient was added, and return what the function must return in place of it.

    With reductions that overlap the backward pass, Megatron's hook wants a gradient, whose values it does not read.
    """
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        # The hook adds this to the gradient of another use, which exists.
        return None
    return torch.empty_like(weight)


def check_device(device: torch.device, dtype: torch.dtype, main_dtype: torch.dtype) -> None:
    """Raise a PlatformError if products are not added to main gradients as they must be on this device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((_NUM_ROWS, _INPUT_SIZE), (_NUM_ROWS, _OUTPUT_SIZE), (_OUTPUT_SIZE, _INPUT_SIZE))
    input_NI, grad_NO, sum_OI = (torch.randn(shape, generator=generator) for shape in shapes)
    input_NI, grad_NO, sum_OI = input_NI.to(dtype), grad_NO.to(dtype), sum_OI.to(main_dtype)

    def compute(device: torch.device, main_dtype: torch.dtype) -> tuple[torch.Tensor]:
        result_OI = sum_OI.to(device, copy=True)
        add_weight_gradient(input_NI.to(device), grad_NO.to(device), result_OI)
        return (result_OI,)

    def define(device: torch.device, main_dtype: torch.dtype) -> tuple[torch.Tensor]:
        wide = torch.float64 if main_dtype == torch.float64 else dtype
        return (sum_OI.to(main_dtype) + (grad_NO.to(wide).t() @ input_NI.to(wide)).to(main_dtype),)

    trials.check(
        "torch does not add products to main gradients", ("a weight's gradient",), compute, define, device, main_dtype,
        lambda: "--no-gradient-accumulation-fusion", f"{dtype} into ",
    )  # fmt: skip


def add_product(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    """Add a @ b to the sum, without rounding the product if torch has an operation for that here."""
    _find_addition(sum_NM.device, a_NK.dtype, sum_NM.dtype)(sum_NM, a_NK, b_KM)


def _add_at_once(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    wider: dict[str, Any] = {} if a_NK.dtype == sum_NM.dtype else {"out_dtype": sum_NM.dtype}
    torch.addmm(sum_NM, a_NK, b_KM, out=sum_NM, **wider)


def _add_wide_product(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    sum_NM += torch.mm(a_NK, b_KM, out_dtype=sum_NM.dtype)


def _add_rounded_product(sum_NM: torch.Tensor, a_NK: torch.Tensor, b_KM: torch.Tensor) -> None:
    sum_NM += a_NK @ b_KM


@functools.cache
def _find_addition(device: torch.device, dtype: torch.dtype, sum_dtype: torch.dtype) -> Callable[..., None]:
    """Return the fastest of these operations that this torch has for the device, tried on a small product."""
    a_88, b_88 = (torch.ones(8, 8, device=device, dtype=dtype) for _ in range(2))
    for add, what in ((_add_at_once, "torch.addmm"), (_add_wide_product, "torch.mm")):
        try:
            # A weight's gradient multiplies by a transposed matrix.
            add(torch.ones(8, 8, device=device, dtype=sum_dtype), a_88.t(), b_88)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            reason = str(error).split("\n")[0]
            _log.info("%s does not sum products of %s in %s on %s: %s", what, dtype, sum_dtype, device.type, reason)
        else:
            return add
    return _add_rounded_product
