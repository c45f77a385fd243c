"""The element-wise work of a layer in Triton kernels: one forward and one backward, which read each tensor once.

Letters: N rows, F the width of a gate, E hidden size, P programs.
"""

from typing import Any

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.triton_support import launch, refuse_triton

# The columns of a program of SwiGLU, and its warps: 16 columns a thread.
SWIGLU_COLUMNS, SWIGLU_WARPS = 1024, 2
# The columns of a step of a program that also sums a row, and its warps.
SUMMING_COLUMNS, SUMMING_WARPS = 512, 1
# A program of a norm has whole rows in registers, 16 columns a thread.
_COLUMNS_OF_WARP = 512
MOST_HIDDEN_SIZE = 8192
# Each program of a norm's gradient sums its rows' part of the weight's gradient. The number of programs follows from
# the number of rows alone: it is the same on every device, and so are the sums.
_MOST_PROGRAMS, _LEAST_ROWS = 512, 8


def refusal(conditions: Conditions) -> str | None:
    """Refuse what `refuse_triton` does, and rows that do not fit into a program's registers."""
    hidden_size = conditions.hidden_size or 0
    if hidden_size > MOST_HIDDEN_SIZE:
        return f"its rows have at most {MOST_HIDDEN_SIZE:,} columns, and the hidden size is {hidden_size:,}"
    return refuse_triton(conditions.device, conditions.dtype)


def swiglu(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up; a row, the last dimension, has its gate first."""
    result: torch.Tensor = _Swiglu.apply(gate_up_N2F)
    return result


def weighted_swiglu(gate_up_N2F: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up times the weight of each row, which may have another dtype than the rows."""
    result: torch.Tensor = _WeightedSwiglu.apply(gate_up_N2F, weights_N)
    return result


def add_and_normalize(
    one_NE: torch.Tensor, other_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one + other, which have the same dtype, and the RMSNorm of this sum over the last dimension."""
    return _AddAndNormalize.apply(one_NE, other_NE, weight_E, eps)  # type: ignore[no-any-return]


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: torch.Tensor) -> torch.Tensor:
        from megatron_rl.ops.elementwise.triton_kernels import swiglu_kernel

        gate_up_N2F = gate_up_N2F.contiguous()
        ctx.save_for_backward(gate_up_N2F)
        *rows, width = gate_up_N2F.shape
        out_NF = gate_up_N2F.new_empty(*rows, width // 2)
        _launch_swiglu(swiglu_kernel, out_NF, gate_up_N2F, out_NF)
        return out_NF

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        from megatron_rl.ops.elementwise.triton_kernels import swiglu_gradient_kernel

        (gate_up_N2F,) = ctx.saved_tensors
        grad_NF, found_N2F = grad_NF.contiguous(), torch.empty_like(gate_up_N2F)
        _launch_swiglu(swiglu_gradient_kernel, grad_NF, grad_NF, gate_up_N2F, found_N2F)
        return found_N2F


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_N2F: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
        from megatron_rl.ops.elementwise.triton_kernels import weighted_swiglu_kernel

        gate_up_N2F, weights_N = gate_up_N2F.contiguous(), weights_N.contiguous()
        ctx.save_for_backward(gate_up_N2F, weights_N)
        *rows, width = gate_up_N2F.shape
        assert weights_N.shape == torch.Size(rows), "each row has one weight"
        out_NF = gate_up_N2F.new_empty(*rows, width // 2)
        _launch_swiglu(weighted_swiglu_kernel, out_NF, gate_up_N2F, weights_N, out_NF)
        return out_NF

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        from megatron_rl.ops.elementwise.triton_kernels import weighted_swiglu_gradient_kernel

        gate_up_N2F, weights_N = ctx.saved_tensors
        found_N2F, weight_grads_N = torch.empty_like(gate_up_N2F), torch.empty_like(weights_N)
        if weights_N.numel() > 0:
            # A program has a whole row, whose products are summed for its weight.
            launch(
                weighted_swiglu_gradient_kernel, (weights_N.numel(),),
                grad_NF.contiguous(), gate_up_N2F, weights_N, found_N2F, weight_grads_N, found_N2F.shape[-1] // 2,
                COLUMNS=SUMMING_COLUMNS, num_warps=SUMMING_WARPS,
            )  # fmt: skip
        return found_N2F, weight_grads_N


def _launch_swiglu(kernel: Any, like_NF: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Launch a kernel on the rows and columns of a tensor, unless there are none."""
    if like_NF.numel() == 0:
        return
    width = like_NF.shape[-1]
    grid = (like_NF.numel() // width, -(-width // SWIGLU_COLUMNS))
    launch(kernel, grid, *tensors, width, COLUMNS=SWIGLU_COLUMNS, num_warps=SWIGLU_WARPS)


class _AddAndNormalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, one_NE: torch.Tensor, other_NE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from megatron_rl.ops.elementwise.triton_kernels import add_norm_kernel

        one_NE, other_NE = one_NE.contiguous(), other_NE.contiguous()
        sum_NE, normed_NE = torch.empty_like(one_NE), torch.empty_like(one_NE)
        width = one_NE.shape[-1]
        scale_N = one_NE.new_empty(one_NE.numel() // width, dtype=torch.float32)
        if len(scale_N) > 0:
            launch(
                add_norm_kernel, (len(scale_N),), one_NE, other_NE, weight_E, sum_NE, normed_NE, scale_N, width, eps,
                **choose_sizes(width),
            )  # fmt: skip
        ctx.save_for_backward(sum_NE, weight_E, scale_N)
        # If nothing uses the sum, or its norm, None stands for that gradient.
        ctx.set_materialize_grads(False)
        return sum_NE, normed_NE

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_sum_NE: torch.Tensor | None, grad_normed_NE: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        from megatron_rl.ops.elementwise.triton_kernels import add_norm_gradient_kernel

        if grad_normed_NE is None:
            return grad_sum_NE, grad_sum_NE, None, None
        sum_NE, weight_E, scale_N = ctx.saved_tensors
        num_rows, width = len(scale_N), sum_NE.shape[-1]
        num_programs, rows = divide_rows(num_rows)
        grad_normed_NE, found_NE = grad_normed_NE.contiguous(), torch.empty_like(sum_NE)
        weight_grads_PE = scale_N.new_empty(num_programs, width)
        if num_rows > 0:
            launch(
                add_norm_gradient_kernel, (num_programs,),
                grad_normed_NE, grad_normed_NE if grad_sum_NE is None else grad_sum_NE.contiguous(),
                sum_NE, weight_E, scale_N, found_NE, weight_grads_PE, width, num_rows, rows,
                WITH_SUM=grad_sum_NE is not None, **choose_sizes(width),
            )  # fmt: skip
        return found_NE, found_NE, weight_grads_PE.sum(dim=0).to(weight_E.dtype), None


def choose_sizes(width: int) -> dict[str, int]:
    """Choose the columns of a program that has whole rows, and its warps."""
    columns = max(_COLUMNS_OF_WARP, 1 << (width - 1).bit_length())
    return {"COLUMNS": columns, "num_warps": columns // _COLUMNS_OF_WARP}


def divide_rows(num_rows: int) -> tuple[int, int]:
    """Return the number of programs of a norm's gradient, none of them without rows, and the rows of each."""
    rows = max(_LEAST_ROWS, -(-num_rows // _MOST_PROGRAMS))
    return -(-num_rows // rows), rows
