"""Calls of torch's varlen operators, tried with stand-ins, because no machine of the tests has CUDA."""

from typing import Any

import pytest
import torch

from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.backends import flash_varlen, gather, merge
from megatron_rl.ops.shared_prompt.backends.flash_varlen import VarlenFlash
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.shared_prompt_cases import BRANCHED, RAGGED, Case, errors
from tests.kernels.varlen_flash import VarlenFlashOperators


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> VarlenFlashOperators:
    stand_in = VarlenFlashOperators()
    monkeypatch.setattr(flash_varlen, "OPERATORS", stand_in)
    monkeypatch.setattr(merge, "choose_calls", lambda device: (VarlenFlash.of,))
    return stand_in


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [RAGGED, BRANCHED], ids=["ragged", "branched"])
def test_merging_varlen_calls_is_as_near_to_the_truth_as_the_definition(
    operators: VarlenFlashOperators, layout: Layout, dtype: torch.dtype
) -> None:
    case = Case.draw(layout, (4, 2), 64, dtype)
    exact = case.exact()
    naive = errors(case.run(BACKENDS["naive"].attention), exact)
    for tensor, error in errors(case.run(merge.attention), exact).items():
        assert error <= 2 * naive[tensor], tensor


def test_any_number_of_groups_takes_two_calls(operators: VarlenFlashOperators) -> None:
    layout = Layout.of_groups([(20, [5, 9, 4])] * 3)
    Case.draw(layout, (2, 2), 8, torch.bfloat16).run(merge.attention)
    assert operators.num_calls == 2


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


def test_enable_gqa_is_passed_only_to_a_torch_that_takes_it() -> None:
    q_THD, k_TGD = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8)
    assert gather.declare_grouping(lambda q, k, v: q, q_THD, k_TGD) == {}
    assert gather.declare_grouping(lambda q, k, v, enable_gqa=False: q, q_THD, k_TGD) == {"enable_gqa": True}
    assert gather.declare_grouping(lambda q, k, v, enable_gqa=False: q, q_THD, q_THD) == {"enable_gqa": False}
