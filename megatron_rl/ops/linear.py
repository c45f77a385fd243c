"""Linear layers whose ranks share rows or columns, as one operation of autograd that costs the host little.

It computes what Megatron's `LinearWithGradAccumulationAndAsyncCommunication` does, in fewer calls: rows are flattened
once, and no wrapper of mixed precision runs around either pass. Communication of the backward pass overlaps a product:
rows are gathered during the product of the inputs' gradient, which is reduced during the product of the weight's.

Letters: N rows, I inputs, O outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.ops.main_gradients import add_weight_gradient, find_main_grad, mark_as_added


def linear(
    input: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    adds_to_main_grad: bool = False,
    group: dist.ProcessGroup | None = None,
    gathers_rows: bool = False,
    reduces_gradient: bool = False,
    multiply: Callable[..., torch.Tensor] = torch.nn.functional.linear,
) -> torch.Tensor:
    """Compute input @ weight.T + bias over the last dimension.

    With `adds_to_main_grad`, the weight's gradient is added to its main gradient, if it has one. The ranks of the group
    have parts of the weight. With `gathers_rows` they also have parts of the input, along its first dimension: the
    output has all rows, and each rank gets the gradient of its own, summed over ranks. With `reduces_gradient` ranks
    have the same input, whose gradient is summed over ranks. `multiply` computes the product of the forward pass.
    """
    out: torch.Tensor = _Linear.apply(
        input, weight_OI, bias_O, adds_to_main_grad, group, gathers_rows, reduces_gradient, multiply
    )
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        adds_to_main_grad: bool,
        group: dist.ProcessGroup | None,
        gathers_rows: bool,
        reduces_gradient: bool,
        multiply: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        rows = input
        if gathers_rows:
            rows, _ = _gather(input, group)
        rows_NI = rows.flatten(0, -2)
        # The backward pass gathers rows once more, which saves the memory of other ranks' rows.
        ctx.save_for_backward(input if gathers_rows else rows_NI, weight_OI)
        # The parameter itself has its main gradient.
        ctx.parameter = weight_OI if adds_to_main_grad else None
        ctx.shape, ctx.group = input.shape, group
        ctx.gathers_rows, ctx.reduces_gradient = gathers_rows, reduces_gradient
        out_NO = multiply(rows_NI, weight_OI, bias_O)
        # Megatron changes outputs in place, which autograd forbids for views.
        out: torch.Tensor = torch.ops.aten._unsafe_view.default(out_NO, (*rows.shape[:-1], len(weight_OI)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows_NI, weight_OI = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_NO = grad.flatten(0, -2)
        # With CUDA_DEVICE_MAX_CONNECTIONS=1 a device begins communication before the product that is called next.
        gathering = reducing = None
        if ctx.gathers_rows and needs_weight:
            rows, gathering = _gather(rows_NI, ctx.group, is_waited_for=False)
            rows_NI = rows.flatten(0, -2)
        grad_NI = torch.mm(grad_NO, weight_OI) if needs_input else None
        if gathering is not None:
            gathering.wait()
        if grad_NI is not None and ctx.gathers_rows:
            of_all_NI, grad_NI = grad_NI, grad_NI.new_empty((len(grad_NI) // ctx.group.size(), grad_NI.shape[1]))
            reducing = dist.reduce_scatter_tensor(grad_NI, of_all_NI, group=ctx.group, async_op=True)
        elif grad_NI is not None and ctx.reduces_gradient:
            reducing = dist.all_reduce(grad_NI, group=ctx.group, async_op=True)
        grad_weight_OI = _differentiate_weight(rows_NI, grad_NO, ctx.parameter) if needs_weight else None
        grad_bias_O = grad_NO.sum(dim=0) if needs_bias else None
        if reducing is not None:
            reducing.wait()
        grad_input = None if grad_NI is None else grad_NI.view(ctx.shape)
        return grad_input, grad_weight_OI, grad_bias_O, None, None, None, None, None


def _gather(
    input: torch.Tensor, group: dist.ProcessGroup | None, is_waited_for: bool = True
) -> tuple[torch.Tensor, dist.Work | None]:
    """Gather the ranks' rows in the order of ranks; if they are not waited for, return what does so."""
    size = dist.get_world_size(group)
    gathered = input.new_empty((size * len(input), *input.shape[1:]))
    work = dist.all_gather_into_tensor(gathered, input.contiguous(), group=group, async_op=not is_waited_for)
    return gathered, work


def _differentiate_weight(
    rows_NI: torch.Tensor, grad_NO: torch.Tensor, parameter: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the weight's gradient, or add it to its main gradient and return what stands for it."""
    main_grad_OI = None if parameter is None else find_main_grad(parameter)
    if parameter is None or main_grad_OI is None:
        return torch.mm(grad_NO.t(), rows_NI)
    add_weight_gradient(rows_NI, grad_NO, main_grad_OI)
    return mark_as_added(parameter)
