"""The kernels of the `triton` backend. Importing this imports Triton, and decides whether it compiles or interprets.

Numbers are computed in fp32 and rounded when they are stored. Sums are taken in a fixed order, without atomics: the
same numbers give the same bits.

Letters: N rows, F the width of a gate, E hidden size, P programs, C columns of a program.
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(gate_up_N2F: tl.tensor, out_NF: tl.tensor, width: tl.tensor, COLUMNS: tl.constexpr) -> None:
    """Store silu(gate) * up of some columns of a row; the row has its gate first."""
    row = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < width
    gate_up_2F = gate_up_N2F + 2 * row * width
    gate_C = tl.load(gate_up_2F + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    up_C = tl.load(gate_up_2F + width + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    out_C = gate_C * tl.sigmoid(gate_C) * up_C
    tl.store(out_NF + row * width + columns_C, out_C.to(out_NF.dtype.element_ty), mask=is_column_C)


@triton.jit
def swiglu_gradient_kernel(
    grad_NF: tl.tensor, gate_up_N2F: tl.tensor, found_N2F: tl.tensor, width: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    """Store the gradients of the gate and of the other half, of some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < width
    first_C = 2 * row * width + columns_C
    gate_C = tl.load(gate_up_N2F + first_C, mask=is_column_C, other=0.0).to(tl.float32)
    up_C = tl.load(gate_up_N2F + first_C + width, mask=is_column_C, other=0.0).to(tl.float32)
    grad_C = tl.load(grad_NF + row * width + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    sigmoid_C = tl.sigmoid(gate_C)
    gate_grad_C = grad_C * up_C * sigmoid_C * (1.0 + gate_C * (1.0 - sigmoid_C))
    up_grad_C = grad_C * gate_C * sigmoid_C
    tl.store(found_N2F + first_C, gate_grad_C.to(found_N2F.dtype.element_ty), mask=is_column_C)
    tl.store(found_N2F + first_C + width, up_grad_C.to(found_N2F.dtype.element_ty), mask=is_column_C)


@triton.jit
def weighted_swiglu_kernel(
    gate_up_N2F: tl.tensor, weights_N: tl.tensor, out_NF: tl.tensor, width: tl.tensor, COLUMNS: tl.constexpr
) -> None:
    """Store silu(gate) * up times the row's weight, of some columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_C = columns_C < width
    gate_up_2F = gate_up_N2F + 2 * row * width
    weight = tl.load(weights_N + row).to(tl.float32)
    gate_C = tl.load(gate_up_2F + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    up_C = tl.load(gate_up_2F + width + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    out_C = gate_C * tl.sigmoid(gate_C) * up_C * weight
    tl.store(out_NF + row * width + columns_C, out_C.to(out_NF.dtype.element_ty), mask=is_column_C)


@triton.jit
def weighted_swiglu_gradient_kernel(
    grad_NF: tl.tensor,
    gate_up_N2F: tl.tensor,
    weights_N: tl.tensor,
    found_N2F: tl.tensor,
    weight_grads_N: tl.tensor,
    width: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Store the gradients of a row's gate, of its other half and of its weight."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_N + row).to(tl.float32)
    weight_grad_C = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, width, COLUMNS):
        columns_C = first + tl.arange(0, COLUMNS)
        is_column_C = columns_C < width
        first_C = 2 * row * width + columns_C
        gate_C = tl.load(gate_up_N2F + first_C, mask=is_column_C, other=0.0).to(tl.float32)
        up_C = tl.load(gate_up_N2F + first_C + width, mask=is_column_C, other=0.0).to(tl.float32)
        grad_C = tl.load(grad_NF + row * width + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
        sigmoid_C = tl.sigmoid(gate_C)
        silu_C = gate_C * sigmoid_C
        weight_grad_C += grad_C * silu_C * up_C
        grad_C *= weight
        gate_grad_C = grad_C * up_C * sigmoid_C * (1.0 + gate_C * (1.0 - sigmoid_C))
        tl.store(found_N2F + first_C, gate_grad_C.to(found_N2F.dtype.element_ty), mask=is_column_C)
        tl.store(found_N2F + first_C + width, (grad_C * silu_C).to(found_N2F.dtype.element_ty), mask=is_column_C)
    weight_grad = tl.sum(weight_grad_C, axis=0)
    tl.store(weight_grads_N + row, weight_grad.to(weight_grads_N.dtype.element_ty))


@triton.jit(do_not_specialize=["eps"])
def add_norm_kernel(
    one_NE: tl.tensor,
    other_NE: tl.tensor,
    weight_E: tl.tensor,
    sum_NE: tl.tensor,
    normed_NE: tl.tensor,
    scale_N: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    """Store a row's sum, its RMSNorm, and the factor by which the norm scales the row.

    The norm is that of the sum as it is stored.
    """
    row = tl.program_id(0).to(tl.int64)
    columns_C = tl.arange(0, COLUMNS)
    is_column_C = columns_C < width
    places_C = row * width + columns_C
    one_C = tl.load(one_NE + places_C, mask=is_column_C, other=0.0).to(tl.float32)
    other_C = tl.load(other_NE + places_C, mask=is_column_C, other=0.0).to(tl.float32)
    stored_C = (one_C + other_C).to(sum_NE.dtype.element_ty)
    tl.store(sum_NE + places_C, stored_C, mask=is_column_C)
    sum_C = stored_C.to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(sum_C * sum_C, axis=0), width.to(tl.float32)) + eps))
    tl.store(scale_N + row, scale)
    weight_C = tl.load(weight_E + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    normed_C = sum_C * scale * weight_C
    tl.store(normed_NE + places_C, normed_C.to(normed_NE.dtype.element_ty), mask=is_column_C)


@triton.jit(do_not_specialize=["num_rows", "rows"])
def add_norm_gradient_kernel(
    grad_normed_NE: tl.tensor,
    grad_sum_NE: tl.tensor,
    sum_NE: tl.tensor,
    weight_E: tl.tensor,
    scale_N: tl.tensor,
    found_NE: tl.tensor,
    weight_grads_PE: tl.tensor,
    width: tl.tensor,
    num_rows: tl.tensor,
    rows: tl.tensor,
    WITH_SUM: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Store the gradient of what was added, for a program's rows, and its part of the weight's gradient."""
    program = tl.program_id(0)
    columns_C = tl.arange(0, COLUMNS)
    is_column_C = columns_C < width
    weight_C = tl.load(weight_E + columns_C, mask=is_column_C, other=0.0).to(tl.float32)
    weight_grad_C = tl.zeros([COLUMNS], tl.float32)
    for row in range(program * rows, tl.minimum((program + 1) * rows, num_rows)):
        places_C = tl.cast(row, tl.int64) * width + columns_C
        grad_C = tl.load(grad_normed_NE + places_C, mask=is_column_C, other=0.0).to(tl.float32)
        sum_C = tl.load(sum_NE + places_C, mask=is_column_C, other=0.0).to(tl.float32)
        scale = tl.load(scale_N + row)
        scaled_C = sum_C * scale
        weight_grad_C += grad_C * scaled_C
        grad_C *= weight_C
        mean = tl.div_rn(tl.sum(grad_C * scaled_C, axis=0), width.to(tl.float32))
        found_C = scale * (grad_C - scaled_C * mean)
        if WITH_SUM:
            found_C += tl.load(grad_sum_NE + places_C, mask=is_column_C, other=0.0).to(tl.float32)
        tl.store(found_NE + places_C, found_C.to(found_NE.dtype.element_ty), mask=is_column_C)
    tl.store(weight_grads_PE + program.to(tl.int64) * width + columns_C, weight_grad_C, mask=is_column_C)
