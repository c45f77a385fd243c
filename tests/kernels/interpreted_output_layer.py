"""The kernels of the output layer: the contract of its backends, and their programs.

test_interpreted.py runs this with TRITON_INTERPRET=1.

Letters: N targets, E hidden size, V columns of the vocabulary.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.log_probs import BACKENDS, VocabularyShard, output_log_probs, triton_fused
from megatron_rl.ops.log_probs.function import RowStatistics, TargetRows
from tests.kernels.output_layer_contract import *  # noqa: F403 - the tests of every backend
from tests.kernels.output_layer_contract import BF16, FP16, FP32, Problem


@pytest.fixture(autouse=True)
def _small_programs() -> Iterator[None]:
    """Give programs few rows and columns, so that few numbers are divided in every way."""
    with (
        mock.patch.object(triton_fused, "COLUMNS", 8),
        mock.patch.object(triton_fused, "JOINED_ROWS", 4),
        mock.patch.object(triton_fused, "_FEW_PROGRAMS", 12),
    ):
        yield


def add_exactly(sum_NE: torch.Tensor, grad_NC: torch.Tensor, weight_CE: torch.Tensor) -> None:
    sum_NE += (grad_NC.double() @ weight_CE.double()).float()


def test_programs_of_the_size_that_runs_give_the_naive_results() -> None:
    problem = Problem(3, 9_001)
    # Some processors add this many products of a few rows one by one, and their error is larger than that of a kernel.
    with (
        mock.patch.object(triton_fused, "add_product", add_exactly),
        mock.patch.object(triton_fused, "COLUMNS", 4096),
        mock.patch.object(triton_fused, "JOINED_ROWS", 128),
    ):
        problem.assert_near(problem.ours())


def test_greatest_and_chosen_logits_are_divided_by_the_temperature_with_one_rounding() -> None:
    hidden_NE, weight_VE = Problem(64, 200, BF16).draw()
    targets_N = torch.arange(64)
    scaled_NV = torch.nn.functional.linear(hidden_NE, weight_VE).float() / torch.tensor(0.7)
    assert not torch.equal(scaled_NV, torch.nn.functional.linear(hidden_NE, weight_VE).float() * (1 / 0.7))
    statistics = RowStatistics(hidden_NE, with_entropies=False)
    with mock.patch.object(triton_fused, "COLUMNS", 128):
        triton_fused.add_block(statistics, TargetRows(hidden_NE, weight_VE), targets_N, 0.7)
    assert torch.equal(statistics.max_N, scaled_NV.amax(dim=1))
    assert torch.equal(statistics.chosen_N, scaled_NV.gather(1, targets_N[:, None])[:, 0])


def test_a_row_that_is_not_divided_gives_near_numbers() -> None:
    problem = Problem(9, 67)
    with mock.patch.object(triton_fused, "_FEW_PROGRAMS", 1):
        assert triton_fused.divide_row(9, 40)[0] == 1
        problem.assert_near(problem.ours(40))


class LargeTensors(TorchDispatchMode):
    """The dtypes of the tensors that operations make, of a number of elements or more."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []
        self._least = least

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        storages = {one.untyped_storage().data_ptr() for one in args if isinstance(one, torch.Tensor)}
        for one in result if isinstance(result, (tuple, list)) else (result,):
            is_new = isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in storages
            if is_new and one.numel() >= self._least:
                self.dtypes.append(one.dtype)
        return result


def test_each_pass_makes_one_tensor_of_a_blocks_size_which_has_the_dtype_of_the_logits() -> None:
    # Blocks are larger than hidden states and weight.
    problem = Problem(40, 300, BF16)
    hidden_NE, weight_VE = (tensor.requires_grad_() for tensor in problem.draw())
    shard = VocabularyShard(0, 300)
    with mock.patch.object(triton_fused, "COLUMNS", 64):
        with LargeTensors(40 * 75) as forward:
            out = output_log_probs(hidden_NE, weight_VE, problem.targets_N, shard, 0.7, 75, True, "triton")
        with LargeTensors(40 * 75) as backward:
            out.sum().backward()
    assert forward.dtypes == backward.dtypes == [BF16] * 4


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_the_kernels_pass_their_trial(dtype: torch.dtype) -> None:
    with mock.patch.object(triton_fused, "COLUMNS", 4096):
        BACKENDS.check("triton", Conditions("cpu", dtype, head_dim=64))
