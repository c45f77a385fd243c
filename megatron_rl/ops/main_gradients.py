"""Weight gradients that are added to a parameter's main gradient in the product that computes them.

Megatron's gradient buffers give each parameter a `main_grad`, into which a hook adds the gradient of autograd. A
function that has added its gradient itself says so in `grad_added_to_main_grad`, and the hook adds nothing. A parameter
of which other uses have gradients that the hook must add has the mark `zero_out_wgrad`, as tied embeddings do.
"""

from typing import Any

import torch

from megatron_rl.ops import trials
from megatron_rl.ops.products import add_product

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
        "--no-gradient-accumulation-fusion", f"{dtype} into ",
    )  # fmt: skip
