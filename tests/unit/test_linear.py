"""Our operation of linear layers on one rank: results and gradients are those of float64, and Megatron's layers use it.

Several ranks are in tests/distributed/test_main_gradients.py.

Letters: I inputs, O outputs.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_rl.ops.linear import linear
from megatron_rl.trainer.mcore.model.fusions import ColumnLinear, RowLinear, replace_linear_layers
from tests.truth import distance, error_over_bound

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ONE = torch.tensor(1.0)
WHAT = ("output", "gradient of the input", "gradient of the weight", "gradient of the bias")


def draw(rows: tuple[int, ...], dtype: torch.dtype, with_bias: bool = True) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw an input, a weight, a bias and the output's gradient, all numbers of the dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(*rows, 7), (5, 7), *[(5,)] * with_bias]
    *given, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, (*rows, 5)))
    return given, grad


def compute(function: Any, given: list[torch.Tensor], grad: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    operands = [one.to(dtype).requires_grad_() for one in given]
    out = function(*operands)
    return [out.detach(), *torch.autograd.grad(out, operands, grad.to(dtype))]


def define(input: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Add up products of numbers."""
    out = (input[..., None, :] * weight_OI).sum(dim=-1)
    return out if bias_O is None else out + bias_O


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("rows", "with_bias"), [((13, 1), True), ((9, 2), False), ((11,), True), ((0,), False)])
def test_a_product_and_all_gradients_are_those_of_float64(
    rows: tuple[int, ...], with_bias: bool, dtype: torch.dtype
) -> None:
    given, grad = draw(rows, dtype, with_bias)
    truths = compute(define, given, grad, FP64)
    theirs = compute(torch.nn.functional.linear, given, grad, dtype)
    for what, one, other, truth in zip(WHAT, compute(linear, given, grad, dtype), theirs, truths, strict=False):
        assert one.dtype == dtype
        assert error_over_bound(one, other, truth) <= 1 if truth.numel() else one.shape == truth.shape, what


def test_rows_with_gaps_and_a_gradient_that_is_one_number_give_the_same() -> None:
    given, _ = draw((6, 3), FP32)
    ours = compute(lambda *operands: linear(operands[0].transpose(0, 1), *operands[1:]).sum(), given, ONE, FP32)
    truths = compute(lambda *operands: define(*operands).sum(), given, ONE, FP64)
    for what, one, truth in zip(WHAT, ours, truths, strict=True):
        assert distance(one, truth) <= 1e-5 * truth.abs().max().item(), what


def test_a_weights_gradient_is_added_to_its_main_gradient_where_it_has_one() -> None:
    (input, weight_OI), grad = draw((13, 1), BF16, with_bias=False)
    _, _, truth = compute(define, [input, weight_OI], grad, FP64)
    before = torch.randn(5, 7)

    def differentiate(adds: bool, **marks: Any) -> torch.nn.Parameter:
        weight = torch.nn.Parameter(weight_OI)
        for name, value in marks.items():
            setattr(weight, name, value)
        for _ in range(2):
            linear(input, weight, None, adds).backward(grad)
        return weight

    added = differentiate(True, main_grad=before.clone(), grad_added_to_main_grad=False)
    assert added.grad_added_to_main_grad is True
    # The product is rounded on a CPU before it is added.
    assert distance(added.main_grad, before.double() + 2 * truth) <= 2 * torch.finfo(BF16).eps * truth.abs().max()
    # A hook of Megatron's that waits for a gradient gets one, whose values it does not read.
    assert added.grad.shape == weight_OI.shape
    tied = differentiate(True, main_grad=before.clone(), grad_added_to_main_grad=False, zero_out_wgrad=True)
    assert tied.grad is None
    assert torch.equal(tied.main_grad, added.main_grad)
    for adds, marks in ((True, {}), (False, {"main_grad": before.clone(), "grad_added_to_main_grad": False})):
        own = differentiate(adds, **marks)
        assert distance(own.grad.double(), 2 * truth) <= 2 * torch.finfo(BF16).eps * truth.abs().max()
        assert torch.equal(getattr(own, "main_grad", before), before)


@pytest.mark.parametrize("frozen", range(3))
def test_what_needs_no_gradient_costs_no_product(frozen: int) -> None:
    given, grad = draw((13, 1), FP32)
    operands = [one.requires_grad_(place != frozen) for place, one in enumerate(given)]
    out = linear(*operands)
    with mock.patch.object(torch, "mm", wraps=torch.mm) as mm:
        out.backward(grad)
    assert [one.grad is None for one in operands] == [place == frozen for place in range(3)]
    assert mm.call_count == (2 if frozen == 2 else 1)


class Ranks:
    """Two ranks with the same rows, for one of them: communication that notes its begin and its end."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def size(self) -> int:
        return 2

    def all_gather_into_tensor(self, whole: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool) -> Any:
        whole.copy_(torch.cat((own, own)))
        return self._begin("gather", async_op)

    def reduce_scatter_tensor(self, own: torch.Tensor, whole: torch.Tensor, group: Any, async_op: bool) -> Any:
        own.copy_(2 * whole[: len(own)])
        return self._begin("scatter", async_op)

    def all_reduce(self, whole: torch.Tensor, group: Any, async_op: bool) -> Any:
        whole.mul_(2)
        return self._begin("reduce", async_op)

    def _begin(self, what: str, async_op: bool) -> Any:
        self.calls.append(what)
        return SimpleNamespace(wait=lambda: self.calls.append(f"{what} ends")) if async_op else None


@pytest.mark.parametrize(
    ("gathers", "reduces", "expected"),
    [
        (True, False, ["gather", "/", "gather", "mm", "gather ends", "scatter", "mm", "scatter ends"]),
        (False, True, ["/", "mm", "reduce", "mm", "reduce ends"]),
    ],
)
def test_communication_runs_beside_the_product_that_does_not_need_it(
    gathers: bool, reduces: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    ranks = Ranks(calls)
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, getattr(ranks, name))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size())
    (input, weight_OI), grad = draw((6, 1), FP32, with_bias=False)
    input, weight_OI = input.requires_grad_(), weight_OI.requires_grad_()
    out = linear(input, weight_OI, None, False, ranks, gathers, reduces)  # type: ignore[arg-type]
    assert len(out) == (12 if gathers else 6)
    calls.append("/")
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given: calls.append("mm") or product(*given))
    out.backward(torch.cat((grad, grad)) if gathers else grad)
    assert calls == expected
    _, of_input, of_weight = compute(define, [input.detach(), weight_OI.detach()], grad, FP64)
    assert distance(input.grad, 2 * of_input) <= 1e-5
    assert distance(weight_OI.grad, (2 if gathers else 1) * of_weight) <= 1e-5


def test_exactly_megatrons_layers_use_the_operation_and_leave_to_megatron_what_it_lacks() -> None:
    class OfARecipe(RowParallelLinear):
        pass

    kinds = (ColumnParallelLinear, RowParallelLinear, OfARecipe)
    layers = torch.nn.ModuleList(kind.__new__(kind) for kind in kinds)
    for layer in layers:
        torch.nn.Module.__init__(layer)
    replace_linear_layers(layers)
    assert [type(layer) for layer in layers] == [ColumnLinear, RowLinear, OfARecipe]

    given = {
        "bias": None, "gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False,
        "tp_group": None, "grad_output_buffer": None,
    }  # fmt: skip
    of_megatron = "megatron.core.tensor_parallel.layers.linear_with_"
    for marks, changes, is_ours in (
        ({}, {}, True),
        ({}, {"gtp_remat_size": 1, "wgrad_deferral_limit": None}, True),
        ({}, {"gtp_remat_size": 2}, False),
        ({}, {"grad_output_buffer": []}, False),
        ({}, {"of_a_later_version": None}, False),
        ({"__fsdp_param__": True}, {}, False),
        ({"requires_grad": False}, {}, False),
    ):
        weight_OI = torch.nn.Parameter(torch.randn(5, 7))
        for name, value in marks.items():
            setattr(weight_OI, name, value)
        with (
            mock.patch(f"{of_megatron}frozen_weight", return_value="megatron's"),
            mock.patch(f"{of_megatron}grad_accumulation_and_async_allreduce", return_value="megatron's"),
        ):
            for layer in layers[:2]:
                found = layer._forward_impl(input=torch.randn(3, 1, 7), weight=weight_OI, **{**given, **changes})
                assert isinstance(found, torch.Tensor) is is_ours, (marks, changes)
