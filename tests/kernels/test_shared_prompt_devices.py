"""Calls of operators for sequences of varying length, tried with stand-ins: no machine of the tests has a device."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_rl.ops.shared_prompt.backends import flash_attention, flash_npu, flash_varlen, gather, merge
from megatron_rl.ops.shared_prompt.backends.flash_varlen import SequenceOffsets, VarlenFlash
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.cuda_operators import FlashAttentionInterface, VarlenFlashOperators
from tests.kernels.npu_operators import NpuOperators
from tests.kernels.shared_prompt_cases import BRANCHED, RAGGED, Case, errors


@pytest.fixture
def of_torch(monkeypatch: pytest.MonkeyPatch) -> VarlenFlashOperators:
    stand_in = VarlenFlashOperators()
    monkeypatch.setattr(flash_varlen, "OPERATORS", stand_in)
    monkeypatch.setattr(merge, "choose_calls", lambda device: (VarlenFlash.of, flash_varlen.TORCH))
    return stand_in


@pytest.fixture
def of_npu(monkeypatch: pytest.MonkeyPatch) -> NpuOperators:
    stand_in = NpuOperators()
    monkeypatch.setitem(sys.modules, "torch_npu", stand_in)
    monkeypatch.setattr(merge, "choose_calls", lambda device: (VarlenFlash.of, flash_npu.KERNELS))
    return stand_in


@pytest.fixture(params=["of_torch", "of_npu", "of_flash_attention"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return what merges calls of some operators."""
    if request.param == "of_flash_attention":
        monkeypatch.setattr(flash_attention, "_import_interface", FlashAttentionInterface)
        return flash_attention.attention
    request.getfixturevalue(request.param)
    return merge.attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [RAGGED, BRANCHED, Layout((0,), (-1,))], ids=["ragged", "branched", "empty"])
def test_merged_calls_are_as_near_to_the_truth_as_the_definition(
    attention: Callable[..., torch.Tensor], layout: Layout, dtype: torch.dtype
) -> None:
    for heads in ((4, 2), (4, 4), (4, 1)):
        Case.draw(layout, heads, 64, dtype).assert_near(attention)


def test_any_number_of_groups_takes_two_calls(of_torch: VarlenFlashOperators) -> None:
    layout = Layout.of_groups([(20, [5, 9, 4])] * 3)
    Case.draw(layout, (2, 2), 8, torch.bfloat16).run(merge.attention)
    assert of_torch.num_calls == 2


def test_gathered_keys_take_one_causal_call_with_the_window_as_torch_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def varlen_attn(*arguments: Any, enable_gqa: bool = False, **keywords: Any) -> torch.Tensor:
        names = ("q", "k", "v", "cu_q", "cu_k", "max_q", "max_k")
        calls.append(dict(zip(names, arguments, strict=True)) | keywords | {"enable_gqa": enable_gqa})
        return arguments[0]

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    case = Case.draw(Layout.of_groups([(20, [5, 9, 4])]), (4, 2), 8, torch.bfloat16)
    gathered = gather.prepare(case.layout, torch.device("cpu"))
    k_NGD = case.k_TGD.index_select(0, gathered.rows_N)
    for window, expected in ((None, (-1, 0)), (7, (6, 0))):
        gather._attend_in_one_call(case.q_THD, k_NGD, k_NGD, gathered, 0.3, window)
        assert calls[-1]["window_size"] == expected
    assert calls[0]["cu_q"].tolist() == [0, 25, 34, 38]
    assert calls[0]["cu_k"].tolist() == [0, 25, 25 + 29, 25 + 29 + 24]
    assert (calls[0]["max_q"], calls[0]["max_k"], calls[0]["enable_gqa"], calls[0]["scale"]) == (25, 29, True, 0.3)


@pytest.mark.parametrize(
    ("varlen_attn", "num_groups", "declared"),
    [
        (lambda q, k, v: q, 2, {}),
        (lambda q, k, v, enable_gqa=False: q, 2, {"enable_gqa": True}),
        (lambda q, k, v, enable_gqa=False: q, 4, {"enable_gqa": False}),
    ],
)
def test_enable_gqa_is_passed_only_to_a_torch_that_takes_it(
    varlen_attn: Callable[..., object], num_groups: int, declared: dict[str, bool]
) -> None:
    assert gather.declare_grouping(varlen_attn, torch.zeros(3, 4, 8), torch.zeros(3, num_groups, 8)) == declared


def test_gathered_keys_take_one_call_of_the_npu(of_npu: NpuOperators) -> None:
    def gathering(q_THD: Any, k_TGD: Any, v_TGD: Any, layout: Layout, scale: float, window: int | None) -> torch.Tensor:
        gathered = gather.prepare(layout, q_THD.device)
        k_NGD, v_NGD = (tensor_TGD.index_select(0, gathered.rows_N) for tensor_TGD in (k_TGD, v_TGD))
        return gather._attend_on_npu(q_THD, k_NGD, v_NGD, gathered, scale)

    Case.draw(RAGGED, (4, 2), 64, torch.bfloat16).assert_near(gathering)
    assert of_npu.num_calls == 1


def test_reading_the_npus_statistics_in_another_order_would_be_found(
    of_npu: NpuOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_shaped(queries: SequenceOffsets, num_heads: int) -> torch.Tensor:
        return torch.arange(queries.num_rows * num_heads).view(-1, num_heads).T

    monkeypatch.setattr(flash_npu, "_find_places_HN", as_shaped)
    case = Case.draw(RAGGED, (4, 2), 64, torch.bfloat16)
    assert max(errors(case.run(merge.attention), case.exact()).values()) > 0.1
