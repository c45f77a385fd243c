"""Calls of torch's cuDNN operators, tried with stand-ins, because no machine of the tests has CUDA."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import PlatformError
from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.backends import cudnn, triton_fused
from megatron_rl.ops.shared_prompt.backends.cudnn import CudnnCalls
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from tests.kernels.cuda_operators import CudnnOperators
from tests.kernels.drawn_layouts import layouts
from tests.kernels.shared_prompt_cases import NAMES, RAGGED, Case, errors

# Two equal groups, one whose first response has another length, a plain sequence and one that is longer; a prompt whose
# first response is empty.
EQUAL = Layout.of_groups([(70, [66, 66, 66]), (70, [66, 66, 66]), (65, [3, 81]), (136, []), (140, []), (64, [0, 67])])


@pytest.fixture(autouse=True)
def _no_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_KINDS", set())


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> CudnnOperators:
    stand_in = CudnnOperators()
    monkeypatch.setattr(cudnn, "OPERATORS", stand_in)
    return stand_in


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [
        ((3, 1), 96, torch.bfloat16),
        ((2, 2), 128, torch.bfloat16),
        ((2, 1), 256, torch.bfloat16),
        ((4, 2), 64, torch.float16),
    ],
)
def test_equal_groups_are_as_near_to_the_truth_as_the_definition_in_the_same_precision(
    operators: CudnnOperators, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    Case.draw(EQUAL, heads, head_dim, dtype).assert_near(cudnn.attention)
    assert operators.calls


def run_and_compare(case: Case) -> dict[str, float]:
    """Return the errors of each tensor, as parts of the bound for fp32."""
    exact = case.exact()
    found = errors(case.run(cudnn.attention), exact)
    return {
        name: found[name] / (2.4e-6 * max(tensor.abs().max().item(), 1.0))
        for name, tensor in zip(NAMES, exact, strict=True)
    }


@settings(max_examples=60)
@given(
    groups=st.lists(
        st.tuples(st.integers(2, 5), st.lists(st.integers(0, 4), max_size=1), st.integers(2, 4), st.integers(0, 3)),
        min_size=1,
        max_size=4,
    ),
    heads=st.sampled_from([(2, 2), (2, 1), (3, 1)]),
)
def test_groups_of_any_size_are_attended_to_as_defined(
    groups: list[tuple[int, list[int], int, int]], heads: tuple[int, int]
) -> None:
    layout = Layout.of_groups([(prompt, [*first, *[length] * count]) for prompt, first, length, count in groups])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "SHORTEST", 2)
        patch.setattr(cudnn, "_KINDS", set())
        # Logarithms have a last dimension in some versions of torch.
        patch.setattr(cudnn, "OPERATORS", CudnnOperators(has_last_dimension=heads != (3, 1)))
        assert cudnn.prepare(layout, torch.device("cuda")) is layout.once(CudnnCalls.of) is not None
        assert max(run_and_compare(Case.draw(layout, heads, 8, torch.float32)).values()) <= 1


@settings(max_examples=200)
@given(layouts())
# Rows that see later rows come first.
@example(Layout((4, 4, 2, 3, 3), (ROOT, ROOT, 1, 1, 0)))
def test_calls_have_each_pair_of_tokens_that_see_each_other_once(layout: Layout) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "SHORTEST", 1)
        patch.setattr(cudnn, "_KINDS", set())
        calls = CudnnCalls.of(layout)
    if calls is None:
        return
    rows = torch.arange(layout.num_tokens)
    seen = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    for call in (*calls.causal, *calls.above):
        for queries, keys in zip(call.queries.view(rows), call.keys.view(rows), strict=True):
            for query in queries.tolist():
                seen[query, [key for key in keys.tolist() if not call.is_causal or key <= query]] += 1
    assert np.array_equal(seen, layout.visible())


def test_a_pack_of_equal_groups_takes_few_calls(operators: CudnnOperators) -> None:
    layout = Layout.of_groups([(90, [70] * 5)] * 3)
    Case.draw(layout, (2, 1), 8, torch.float32).run(cudnn.attention)
    # The prompts with their first responses; each group's other responses; all of these with their prompts.
    assert operators.calls == [(3, 160, 160), *[(4, 70, 70)] * 3, (3, 280, 90)]


@pytest.mark.parametrize(
    ("layout", "is_taken"),
    [
        (RAGGED, False),
        (Layout.of_groups([(90, [70, 70, 71])]), False),
        (Layout.of_groups([(90, [70, 63, 63])]), False),
        (Layout.of_groups([(63, [70, 70, 70])]), False),
        (Layout((0, 0), (ROOT, 0)), False),
        # Conversations: turns of one sequence, a turn with two answers, and a prompt that is seen in two lengths.
        (Layout((90, 70, 70, 70), (ROOT, 0, 1, 0)), True),
        (Layout((90, 70, 80, 80, 80), (ROOT, 0, 0, 2, 2)), False),
        (Layout((90, 70, 80, 80), (ROOT, 0, 0, 1)), False),
    ],
)
def test_other_packs_go_through_triton(
    layout: Layout, is_taken: bool, operators: CudnnOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(triton_fused, "attention", lambda *arguments: calls.append(arguments) or arguments[0])
    case = Case.draw(layout, (2, 1), 8, torch.bfloat16)
    cudnn.attention(case.q_THD, case.k_TGD, case.v_TGD, layout, case.scale)
    assert (not calls, bool(operators.calls)) == (is_taken, is_taken)
    device = torch.device("cuda")
    kept = layout.once(CudnnCalls.of) if is_taken else triton_fused.prepare(layout, device)
    assert cudnn.prepare(layout, device) is kept


def test_only_so_many_kinds_of_calls_are_planned_and_known_ones_are_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cudnn, "MOST_KINDS", 6)
    groups = [(90, [70] * 5), (91, [70] * 5), (92, [70] * 5), (93, [71] * 4)]
    # A group takes three kinds: of the first strand, the other responses, and all of these with their prompt.
    taken = [CudnnCalls.of(Layout.of_groups([group])) is not None for group in groups]
    assert taken == [True, True, False, False]
    assert CudnnCalls.of(Layout.of_groups([(300, []), groups[0]])) is not None
    assert CudnnCalls.of(Layout.of_groups([groups[0]])) is not None
    assert len(cudnn._KINDS) == 6


def test_a_backward_with_results_that_are_not_joined_would_be_found(
    operators: CudnnOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.draw(EQUAL, (4, 2), 16, torch.float32)
    assert max(run_and_compare(case).values()) <= 1
    true = cudnn._differentiate

    def of_its_own_results(call, inputs, outputs, lse, rest, scale):
        own = cudnn._attend(call, inputs, scale)
        return true(call, inputs, outputs, own.lse, rest, scale)

    monkeypatch.setattr(cudnn, "_differentiate", of_its_own_results)
    found = run_and_compare(case)
    assert found["out"] <= 1
    assert min(found[name] for name in ("queries", "keys", "values")) > 1e3


def test_inputs_and_gradients_may_be_views(operators: CudnnOperators) -> None:
    case = Case.draw(EQUAL, (4, 4), 16, torch.float32)
    stacked = torch.stack([case.q_THD, case.k_TGD, case.v_TGD], dim=1)

    def differentiate(attention: Any, dtype: torch.dtype) -> torch.Tensor:
        mixed = stacked.to(dtype, copy=True).requires_grad_()
        # The gradient of a sum is one number, without memory of its own.
        attention(*mixed.unbind(1), case.layout, case.scale, None).sum().backward()
        return mixed.grad

    found = differentiate(cudnn.attention, torch.float32)
    truth = differentiate(BACKENDS["naive"].attention, torch.float64)
    assert (found - truth).abs().max() <= 2.4e-6 * truth.abs().max()


def test_the_trial_before_training_reaches_the_calls_and_says_how_they_fail(
    operators: CudnnOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_fused, "attention", BACKENDS["naive"].attention)
    monkeypatch.setattr(cudnn, "refusal", lambda conditions: None)
    conditions = Conditions("cpu", torch.bfloat16, head_dim=64, queries=2)
    BACKENDS.check("cudnn", conditions)
    assert operators.calls
    name = "_scaled_dot_product_cudnn_attention_backward"
    true = getattr(operators, name)
    monkeypatch.setattr(operators, name, lambda *given, **named: [1.1 * part for part in true(*given, **named)])
    with pytest.raises(PlatformError, match="backend cudnn does not compute attention on cpu: the gradient of queries"):
        BACKENDS.check("cudnn", conditions)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no engine\n for this")

    monkeypatch.setattr(operators, name, fail)
    with pytest.raises(PlatformError, match="on cpu: it fails with RuntimeError: no engine for this"):
        BACKENDS.check("cudnn", conditions)


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (Conditions("cuda", torch.bfloat16, head_dim=128), None),
        (Conditions("cuda", torch.float16, head_dim=64), None),
        (Conditions("cuda", torch.float32), "needs --bf16 or --fp16"),
        (Conditions("cuda", torch.bfloat16, head_dim=36), "must be a multiple of 8, and the model's are 36 wide"),
        (Conditions("cuda", torch.bfloat16, window=4), "no sliding window"),
        (Conditions("cuda", torch.bfloat16, has_sinks=True), "no sinks"),
        (Conditions("cuda", torch.bfloat16, head_dim=192, value_dim=128), "values must be as wide as keys"),
        (Conditions("npu", torch.bfloat16), "cuDNN does not run on npu"),
        (Conditions("cpu", torch.bfloat16), "cuDNN does not run on cpu"),
    ],
)
def test_cudnn_says_why_it_cannot_run(
    conditions: Conditions, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    found = cudnn.refusal(conditions)
    assert found == reason or (reason is not None and found is not None and reason in found)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert cudnn.refusal(conditions) is not None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert cudnn.refusal(dataclasses.replace(conditions, device="cuda")) == "cuDNN does not run on AMD GPUs"


@pytest.mark.parametrize(
    ("version", "capability", "runs"), [(91000, (9, 0), True), (90900, (9, 0), False), (92000, (10, 0), False)]
)
def test_wide_heads_run_where_cudnn_has_kernels_for_them(
    version: int, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    wide = Conditions("cuda", torch.bfloat16, head_dim=256)
    assert cudnn.refusal(wide) == (
        None if runs else "cuDNN has no heads wider than 128 here, and the model's are 256 wide"
    )
    assert "at most 256 wide" in (cudnn.refusal(dataclasses.replace(wide, head_dim=512)) or "") or not runs
