"""The kernels of a layer's element-wise work against their definitions in float64.

test_interpreted.py runs this with TRITON_INTERPRET=1.

Letters: N rows, F the width of a gate, E hidden size.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.elementwise import BACKENDS, plain, triton_fused
from megatron_rl.trainer.mcore.model.fusions import RMSNorm
from tests.truth import assert_near, distance, error_over_bound

# The exponential of a large number.
pytestmark = [
    pytest.mark.usefixtures("unwritten_memory_is_nan"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
EPS = 1e-5


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def differentiate(
    operation: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]], given: list[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return results and gradients, from a loss with uneven weights of both signs."""
    operands = [tensor.to(dtype, copy=True).requires_grad_() for tensor in given]
    results = operation(*operands)
    results = results if isinstance(results, tuple) else (results,)
    losses = [
        (one * torch.sin(torch.arange(one.numel(), dtype=torch.float64) + 1 + place).to(dtype).reshape(one.shape)).sum()
        for place, one in enumerate(results)
    ]
    sum(losses).backward()
    return [*(one.detach() for one in results), *(operand.grad for operand in operands)]


def check(
    name: str,
    given: list[torch.Tensor],
    dtype: torch.dtype = FP32,
    change: Callable[[Any], Any] = lambda operation: operation,
) -> list[torch.Tensor]:
    """Check results and gradients of an operation of the kernels, and return them; `change` wraps the operation."""
    ours, theirs = (change(getattr(module, name)) for module in (triton_fused, plain))
    found = differentiate(ours, given, dtype)
    assert_near(found, *(differentiate(theirs, given, precision) for precision in (dtype, torch.float64)))
    return found


def with_eps(add_and_normalize: Any) -> Any:
    return functools.partial(add_and_normalize, eps=EPS)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 2), (5, 97), (3, 1024), (2, 1500)])
def test_swiglu_and_its_gradient_are_those_of_the_definition(num_rows: int, width: int, dtype: torch.dtype) -> None:
    (gates,) = draw((num_rows, 1, 2 * width), dtype=dtype)
    gates[0, 0, 0] = -100.0
    check("swiglu", [gates], dtype)


@pytest.mark.parametrize(("dtype", "of_weights"), [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32)])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 2), (5, 97), (2, 1500)])
def test_swiglu_of_experts_and_the_gradients_of_rows_and_their_weights_are_those_of_the_definition(
    num_rows: int, width: int, dtype: torch.dtype, of_weights: torch.dtype
) -> None:
    rows, weights = draw((num_rows, 2 * width), (num_rows,), dtype=dtype)
    rows[0, 0], weights[0] = -100.0, 0.0

    grad = torch.sin(torch.arange(num_rows * width) + 1.0).view(num_rows, width).to(dtype)

    def compute(operation: Callable[..., torch.Tensor], of_rows: torch.dtype, of_weights: torch.dtype) -> Any:
        given = [rows.to(of_rows).requires_grad_(), weights.to(of_weights).requires_grad_()]
        out = operation(*given)
        return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]

    truth = compute(plain.weighted_swiglu, torch.float64, torch.float64)
    theirs = compute(plain.weighted_swiglu, dtype, of_weights)
    found = compute(triton_fused.weighted_swiglu, dtype, of_weights)
    assert_near(found[:2], theirs[:2], truth[:2])
    # These are few numbers, which the interpreter rounds towards 0 in bf16.
    assert error_over_bound(found[2], theirs[2], truth[2]) <= 1
    if dtype is not of_weights:
        # The sum over a row is that of fp32, and not rounded to the rows' precision.
        assert distance(found[2], truth[2]) <= 1e-5 * truth[2].abs().max()
    # A row of weight 0, as padding has, gives its own weight a gradient and its numbers none.
    assert not found[0][0].any()
    assert not found[1][0].any()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 5), (9, 97), (20, 512), (2, 1500)])
def test_a_residuals_sum_its_norm_and_all_gradients_are_those_of_the_definition(
    num_rows: int, width: int, dtype: torch.dtype
) -> None:
    given = draw((num_rows, 1, width), (num_rows, 1, width), (width,), dtype=dtype)
    found = check("add_and_normalize", given, dtype, with_eps)
    # Triton's interpreter rounds numbers in bf16 towards 0.
    assert dtype is BF16 or torch.equal(found[0], given[0] + given[1])


def test_tensors_with_gaps_and_rows_of_zeros_give_the_same() -> None:
    one_NE, other_NE, weight_E = draw((9, 40), (9, 40), (40,))
    one_NE[3], other_NE[3] = 0, 0

    def add_with_gaps(operation: Any) -> Any:
        def add(one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            results = operation(one[:, ::2], other.t()[::2].t(), weight[:20].clone(), EPS)
            return tuple(result.t() for result in results)

        return add

    check("add_and_normalize", [one_NE, other_NE, weight_E], change=add_with_gaps)
    check("swiglu", [one_NE[:8]], change=lambda operation: lambda rows: operation(rows.t()).t())
    check(
        "weighted_swiglu",
        [one_NE, weight_E],
        change=lambda operation: lambda rows, weights: operation(rows[:, ::2], weights[::4][:9]).t(),
    )


@pytest.mark.parametrize("used", [0, 1])
def test_a_sum_or_a_norm_that_nothing_uses_leaves_the_others_gradient(used: int) -> None:
    given = draw((11, 30), (11, 30), (30,))
    operands = [[one.clone().requires_grad_() for one in given] for _ in range(2)]
    for operation, leaves in zip((plain, triton_fused), operands, strict=True):
        operation.add_and_normalize(*leaves, EPS)[used].square().sum().backward()
    for one, other in zip(*operands, strict=True):
        if one.grad is not None and other.grad is not None:
            assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-5)
        else:
            # The weight has no gradient if only the sum is used.
            assert used == 0
            assert one is operands[0][2]
            assert other.grad is None


def test_rows_that_programs_divide_give_the_same_bits_again_and_all_rows_count() -> None:
    given = draw((50, 30), (50, 30), (30,))
    for most, least in ((512, 8), (3, 1), (1, 1), (50, 1)):
        with mock.patch.multiple(triton_fused, _MOST_PROGRAMS=most, _LEAST_ROWS=least):
            first, second = (check("add_and_normalize", given, change=with_eps) for _ in range(2))
        assert all(map(torch.equal, first, second))


def test_no_rows_give_nothing_and_a_weights_gradient_of_zero() -> None:
    total, normed, *grads = differentiate(
        with_eps(triton_fused.add_and_normalize), draw((0, 1, 8), (0, 1, 8), (8,)), FP32
    )
    assert total.shape == normed.shape == grads[0].shape == (0, 1, 8)
    assert torch.equal(grads[2], torch.zeros(8))
    assert triton_fused.swiglu(torch.zeros(0, 1, 8)).shape == (0, 1, 4)
    out, *grads = differentiate(triton_fused.weighted_swiglu, draw((0, 8), (0,)), FP32)
    assert [one.shape for one in (out, *grads)] == [(0, 4), (0, 8), (0,)]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_the_kernels_pass_their_trial(dtype: torch.dtype) -> None:
    BACKENDS.check("triton", Conditions("cpu", dtype, head_dim=64))


def test_a_norm_takes_its_own_result_for_the_very_sum_once_and_only_with_the_gradient_it_needs() -> None:
    config: Any = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=False, params_dtype=FP32, sequence_parallel=False
    )
    own, other = RMSNorm(config, 6, EPS), RMSNorm(config, 6, EPS)
    with torch.no_grad():
        other.weight.fill_(2.0)
    one, residual = draw((3, 1, 6), (3, 1, 6))
    with mock.patch.object(torch.nn.functional, "rms_norm", wraps=torch.nn.functional.rms_norm) as plainly:
        expected_norm = plain.add_and_normalize(one, residual, own.weight, EPS)[1].detach()
        plainly.reset_mock()
        total = own(one, residual)
        assert torch.allclose(other(total), 2 * expected_norm, atol=1e-6)
        assert plainly.call_count == 1
        for num_calls in (1, 2):
            assert torch.allclose(own(total), expected_norm, atol=1e-6)
            assert plainly.call_count == num_calls
        assert torch.allclose(own(own(one, residual).clone()), expected_norm, atol=1e-6)
        assert plainly.call_count == 3
        with torch.no_grad():
            total = own(one, residual)
        own(total.requires_grad_()).sum().backward()
        assert plainly.call_count == 4
    assert total.grad is not None
    assert own.weight.grad is not None
