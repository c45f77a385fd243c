"""Every backend against the dense definition in float64, forward and all gradients."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.backends import flash_cpu, merge
from megatron_rl.ops.shared_prompt.backends.flash_cpu import CpuFlash, FlashCall, RowRanges
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout, find_strands
from tests.kernels.drawn_layouts import layouts
from tests.kernels.shared_prompt_cases import BRANCHED, NAMES_WITH_SINKS, RAGGED, Case, errors
from tests.truth import worst_of

FAST = [
    name for name, one in BACKENDS.items() if name != "naive" and one.refusal(Conditions("cpu", torch.float64)) is None
]
WINDOWED = ["gather"]
SHAPES = list(itertools.product((RAGGED, BRANCHED), ((4, 4), (4, 2), (4, 1)), (64, 96, 128, 256)))


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=80)
@given(layout=layouts(), heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]), value_dim=st.sampled_from([8, 5, 12]))
def test_any_forest_is_attended_to_as_defined(
    name: str, layout: Layout, heads: tuple[int, int], value_dim: int
) -> None:
    case = Case.draw(layout, heads, head_dim=8, value_dim=value_dim)
    assert max(errors(case.run(BACKENDS.find(name).attention), case.exact()).values()) <= 1e-12


@pytest.mark.each_change
@pytest.mark.parametrize("name", WINDOWED)
@settings(max_examples=60)
@given(layout=layouts(), heads=st.sampled_from([(4, 2), (2, 2)]), window=st.integers(1, 9))
def test_a_window_hides_what_is_further_away(name: str, layout: Layout, heads: tuple[int, int], window: int) -> None:
    case = Case.draw(layout, heads, head_dim=8, window=window)
    assert max(errors(case.run(BACKENDS.find(name).attention), case.exact()).values()) <= 1e-12


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=40)
@given(layout=layouts(), heads=st.sampled_from([(4, 2), (3, 1)]), window=st.none() | st.integers(1, 9))
def test_a_sink_takes_its_share_of_each_softmax(
    name: str, layout: Layout, heads: tuple[int, int], window: int | None
) -> None:
    case = Case.draw(layout, heads, head_dim=8, window=window if name in WINDOWED else None, has_sinks=True)
    assert max(errors(case.run(BACKENDS.find(name).attention), case.exact()).values()) <= 1e-12


@pytest.mark.each_change
@pytest.mark.parametrize("name", FAST)
def test_fp32_is_as_near_to_the_truth_as_the_definition_in_fp32(name: str) -> None:
    for layout, heads, head_dim in SHAPES:
        case = Case.draw(layout, heads, head_dim, torch.float32, has_sinks=head_dim == 64)
        found = (case.run(BACKENDS.find(name).attention), case.run(BACKENDS["naive"].attention), case.exact())
        error, tensor = worst_of(*(dict(zip(NAMES_WITH_SINKS, tensors, strict=False)) for tensors in found))
        assert error <= 1, (tensor, heads, head_dim)


@pytest.mark.each_change
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAST)
def test_the_error_is_at_most_twice_that_of_the_definition_in_the_same_precision(name: str, dtype: torch.dtype) -> None:
    for layout, heads, head_dim in SHAPES:
        case = Case.draw(layout, heads, head_dim, dtype, has_sinks=head_dim == 64)
        case.assert_near(BACKENDS.find(name).attention)


@pytest.mark.parametrize("name", FAST)
def test_inputs_and_gradients_may_be_views(name: str) -> None:
    case = Case.draw(RAGGED, (4, 4), head_dim=16)
    # One product gives all three, and the gradient of a sum is one number.
    mixed = torch.stack([case.q_THD, case.k_TGD, case.v_TGD], dim=-1).requires_grad_()
    BACKENDS.find(name).attention(*mixed.unbind(-1), case.layout, case.scale, None).sum().backward()
    plain = torch.stack([case.q_THD, case.k_TGD, case.v_TGD], dim=-1).requires_grad_()
    BACKENDS["naive"].attention(*plain.unbind(-1), case.layout, case.scale, None).sum().backward()
    torch.testing.assert_close(mixed.grad, plain.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", FAST)
def test_two_threads_give_the_same_bits_every_time(name: str) -> None:
    case = Case.draw(Layout.of_groups([(200, [64, 64, 90, 70]), (130, [64, 50])]), (8, 4), 64, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = case.run(BACKENDS.find(name).attention)
        for _ in range(5):
            again = case.run(BACKENDS.find(name).attention)
            assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(before)


def test_a_backward_with_unmerged_results_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true_gradients = flash_cpu._gradients

    def of_its_own_results(
        call: FlashCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
    ) -> list[torch.Tensor]:
        grad_out_THD, *merged = outputs
        own = [tensor.clone() for tensor in merged]
        for tensor, part in zip(own, flash_cpu._attend(call, inputs, scale), strict=True):
            call.queries.view(tensor).copy_(part)
        return true_gradients(call, inputs, (grad_out_THD, *own), scale)

    monkeypatch.setattr(flash_cpu, "_gradients", of_its_own_results)
    case = Case.draw(RAGGED, (4, 2), head_dim=16)
    found = errors(case.run(merge.attention), case.exact())
    assert found["out"] <= 1e-12
    assert min(found[name] for name in ("queries", "keys", "values")) >= 1e-1


@pytest.mark.each_change
@pytest.mark.parametrize("name", FAST)
def test_long_forests_are_attended_to_as_defined(name: str) -> None:
    case = Case.draw(Layout.of_groups([(700, [193, 400, 400, 20]), (1, [385])]), (2, 1), head_dim=8)
    assert max(errors(case.run(BACKENDS.find(name).attention), case.exact()).values()) <= 1e-12


@pytest.mark.each_change
@settings(max_examples=80)
@given(layout=layouts(), tile=st.sampled_from([1, 2, 4]))
def test_tiles_of_any_size_add_up(layout: Layout, tile: int) -> None:
    case = Case.draw(layout, (4, 2), head_dim=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_cpu, "TILE", tile)
        assert max(errors(case.run(merge.attention), case.exact()).values()) <= 1e-12


@given(length=st.integers(1, 900), count=st.integers(1, 2))
def test_tiles_cover_each_pair_of_a_causal_call_once(length: int, count: int) -> None:
    rows = torch.arange(count * length)
    sequences = RowRanges(0, length, count, length)
    seen = torch.zeros(count * length, count * length, dtype=torch.int8)
    for tile in FlashCall(sequences, sequences).tiles():
        if not tile.is_causal:
            assert all(seen[row, row] for row in tile.queries.view(rows).flatten()), "a causal one comes first"
        for queries, keys in zip(tile.queries.view(rows), tile.keys.view(rows), strict=True):
            seen[queries[0] : queries[-1] + 1, keys[0] : keys[-1] + 1] += (
                (queries[:, None] >= keys).to(torch.int8) if tile.is_causal else 1
            )
    sequence = rows // length
    assert torch.equal(seen, ((rows[:, None] >= rows) & (sequence[:, None] == sequence)).to(torch.int8))


@given(layouts())
def test_strands_cover_the_buffer_and_see_their_paths(layout: Layout) -> None:
    found = find_strands(layout)
    assert [row for strand in found for row in range(*strand.rows)] == list(range(layout.num_tokens))
    visible = layout.visible()
    for strand in found:
        above = [row for rows in strand.above for row in range(*rows)]
        for row in range(*strand.rows):
            assert sorted([*above, *range(strand.rows.start, row + 1)]) == visible[row].nonzero()[0].tolist()
        assert layout.positions[[*above, *range(*strand.rows)]].tolist() == list(range(strand.num_keys))


def test_a_group_takes_three_calls_and_a_chain_takes_one() -> None:
    group = CpuFlash.of(Layout.of_groups([(512, [64] * 8)]))
    assert [(call.queries.number, call.is_causal) for call in group.calls] == [(1, True), (7, True), (1, False)]
    chain = CpuFlash.of(Layout((5, 0, 3, 4), (ROOT, 0, 1, 2)))
    assert [call.queries for call in chain.calls] == [(0, 12, 1, 12)]


def test_tables_of_a_layout_are_built_once() -> None:
    layout = Layout.of_groups([(5, [3, 2])])
    for name in FAST:
        prepare = BACKENDS.find(name).prepare
        assert prepare(layout, torch.device("cpu")) is prepare(layout, torch.device("cpu"))


def test_tables_of_all_windows_of_a_model_are_made_ahead() -> None:
    layout = Layout.of_groups([(5, [3, 2])])
    triton = BACKENDS.find("triton")
    for window in (4, None):
        triton.prepare(layout, torch.device("cpu"), window)
    kept = dict(layout.kept)
    assert len(kept) == 2
    for window in (4, None):
        triton.prepare(layout, torch.device("cpu"), window)
    assert layout.kept == kept
