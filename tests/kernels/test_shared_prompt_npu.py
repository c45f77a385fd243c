"""Shared-prompt attention by the NPU's operators, tried with a stand-in for torch_npu."""

import sys

import pytest
import torch

from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.backends import flash_npu, gather, merge
from megatron_rl.ops.shared_prompt.backends.flash_varlen import SequenceOffsets, VarlenFlash
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.npu_operators import NpuOperators
from tests.kernels.shared_prompt_cases import BRANCHED, RAGGED, Case, errors


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> NpuOperators:
    stand_in = NpuOperators()
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    monkeypatch.setattr(merge, "choose_calls", lambda device: (VarlenFlash.of, flash_npu.KERNELS))
    return stand_in


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("layout", [RAGGED, BRANCHED], ids=["ragged", "branched"])
def test_merging_calls_of_the_npu_is_as_near_to_the_truth_as_the_definition(
    operators: NpuOperators, layout: Layout, heads: tuple[int, int]
) -> None:
    case = Case.draw(layout, heads, 64, torch.bfloat16)
    exact = case.exact()
    naive = errors(case.run(BACKENDS["naive"].attention), exact)
    for tensor, error in errors(case.run(merge.attention), exact).items():
        assert error <= 2 * naive[tensor], tensor
    assert operators.num_calls > 0


def test_gathered_keys_take_one_call_of_the_npu(operators: NpuOperators) -> None:
    case = Case.draw(RAGGED, (4, 2), 64, torch.bfloat16)

    def gathering(
        q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, layout: Layout, scale: float, window: int | None
    ) -> torch.Tensor:
        gathered = gather.prepare(layout, q_THD.device)
        k_NGD, v_NGD = (tensor_TGD.index_select(0, gathered.rows_N) for tensor_TGD in (k_TGD, v_TGD))
        return gather._attend_on_npu(q_THD, k_NGD, v_NGD, gathered, scale)

    exact = case.exact()
    naive = errors(case.run(BACKENDS["naive"].attention), exact)
    for tensor, error in errors(case.run(gathering), exact).items():
        assert error <= 2 * naive[tensor], tensor
    assert operators.num_calls == 1


def test_reading_the_npus_statistics_in_another_order_would_be_found(
    operators: NpuOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_shaped(queries: SequenceOffsets, num_heads: int) -> torch.Tensor:
        return torch.arange(queries.num_rows * num_heads).view(-1, num_heads).T

    monkeypatch.setattr(flash_npu, "_find_places_HN", as_shaped)
    case = Case.draw(RAGGED, (4, 2), 64, torch.bfloat16)
    exact = case.exact()
    assert max(errors(case.run(merge.attention), exact).values()) > 0.1
