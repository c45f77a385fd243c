"""The fused backend in Triton: the rows that its programs compute, and its kernels, compiled."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.ops.shared_prompt.backends.triton_blocks import choose_blocks, find_chip
from megatron_rl.ops.shared_prompt.backends.triton_tables import FEW_PARTS, MOST_PARTS, SHORT_ITEM, TILE, TileTables
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.drawn_layouts import layouts

tile_sizes = st.integers(1, 5)
short_items = st.one_of(st.none(), st.integers(1, 9))


@settings(max_examples=200)
@given(layouts(), tile_sizes)
def test_a_query_meets_each_key_that_it_sees_once(layout: Layout, tile: int) -> None:
    tables = TileTables.of(layout, tile=tile)
    met = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    for first, strand_start, strand_end, first_range, end_range in tables.query_tiles.tolist():
        ranges = [*tables.ranges[first_range:end_range].tolist(), [strand_start, min(first + tile, strand_end)]]
        for row in range(first, min(first + tile, strand_end)):
            for start, end in ranges:
                met[row, start : min(end, row + 1)] += 1
    assert np.array_equal(met, layout.visible())


@settings(max_examples=200)
@given(layouts(), tile_sizes, short_items, st.none() | st.integers(1, 9))
def test_a_key_meets_each_query_that_sees_it_once(
    layout: Layout, tile: int, short_item: int | None, window: int | None
) -> None:
    tables = TileTables.of(layout, window, tile, short_item)
    met = np.zeros((layout.num_tokens, layout.num_tokens), dtype=int)
    for first, num_keys, start, end, _ in tables.key_items.tolist():
        assert 0 < num_keys <= tile
        assert start < end
        for key in range(first, first + num_keys):
            met[max(start, key) : end, key] += 1
        if window is not None:
            # The kernel hides the rest by the difference of rows, which is that of positions but for one number.
            assert len(set(layout.positions[start:end] - np.arange(start, end))) == 1
            assert len(set(layout.positions[first : first + num_keys] - np.arange(first, first + num_keys))) == 1
            assert layout.positions[start] - layout.positions[first + num_keys - 1] < window
    assert np.array_equal(met * layout.visible(window), layout.visible(window))
    assert window is not None or np.array_equal(met, layout.visible())


@settings(max_examples=200)
@given(layouts(), tile_sizes, short_items)
def test_each_key_is_written_once(layout: Layout, tile: int, short_item: int | None) -> None:
    tables = TileTables.of(layout, None, tile, short_item)
    items = tables.key_items.tolist()
    writes = [(first, num_keys) for first, num_keys, _, _, slot in items if slot == -1]
    slots = {slot: (first, num_keys) for first, num_keys, _, _, slot in items if slot != -1}
    assert sorted(slots) == list(range(tables.num_slots))
    summed = []
    for first, num_keys, start_slot, end_slot in tables.sums.tolist():
        # Rows after the keys of a slot are zeros.
        assert end_slot - start_slot > 1
        assert all(slots[slot][0] == first and slots[slot][1] <= num_keys for slot in range(start_slot, end_slot))
        summed += range(start_slot, end_slot)
        writes.append((first, num_keys))
    assert summed == list(range(tables.num_slots))
    assert [row for first, num in sorted(writes) for row in range(first, first + num)] == [*range(layout.num_tokens)]


def test_the_longest_work_is_first() -> None:
    tables = TileTables.of(Layout.of_groups([(700, [300, 900]), (90, [20])]))
    lengths = (tables.key_items[:, 3] - tables.key_items[:, 2]).tolist()
    assert lengths == sorted(lengths, reverse=True)
    above = [sum(end - start for start, end in tables.ranges[a:b].tolist()) for *_, a, b in tables.query_tiles.tolist()]
    keys = [first - start + num for (first, start, *_), num in zip(tables.query_tiles.tolist(), above, strict=True)]
    assert keys == sorted(keys, reverse=True)


def test_responses_that_lie_side_by_side_are_one_range_of_queries() -> None:
    tables = TileTables.of(Layout.of_groups([(TILE, [TILE] * 4)]), short_item=SHORT_ITEM)
    assert tables.key_items.tolist() == [
        [0, TILE, 0, 5 * TILE, -1],
        *([start * TILE, TILE, start * TILE, (start + 1) * TILE, -1] for start in (1, 2, 3, 4)),
    ]
    assert tables.num_slots == 0


def test_little_work_is_divided_so_that_it_occupies_a_gpu_and_much_work_is_not_divided_more() -> None:
    small, large = Layout.of_groups([(512, [64] * 8)]), Layout.of_groups([(1024, [4096] * 4)])
    before, after = (TileTables.of(small, short_item=short_item).key_items for short_item in (SHORT_ITEM, None))
    lengths = after[:, 3] - after[:, 2]
    # Programs that a GPU has at once: an item for each head of keys and values.
    assert (len(before), len(after)) == (12, 34)
    assert (before[:, 3] - before[:, 2]).max() == 8 * TILE
    assert lengths.max() == TILE
    assert lengths.sum() == (before[:, 3] - before[:, 2]).sum()
    of_large = [TileTables.of(large, short_item=short_item).key_items for short_item in (SHORT_ITEM, None)]
    assert torch.equal(*of_large)
    assert len(of_large[0]) > FEW_PARTS


def test_partial_sums_take_bounded_memory() -> None:
    tables = TileTables.of(Layout.of_groups([(32768, [4096] * 16)]))
    assert MOST_PARTS / 2 < tables.num_slots <= 2 * MOST_PARTS


def test_tables_have_the_layout_that_compiled_kernels_expect() -> None:
    for num_responses in range(6):
        tables = TileTables.of(Layout.of_groups([(300, [40] * num_responses)]))
        for table in (tables.query_tiles, tables.ranges, tables.key_items, tables.sums):
            assert table.dtype == torch.int32
            assert table.is_contiguous()


@pytest.mark.parametrize(
    ("properties", "queries"),
    [
        ({"major": 9, "shared_memory_per_block_optin": 232448}, 128),
        ({"major": 8, "shared_memory_per_block_optin": 101376}, 64),
        ({"major": 9}, 64),
    ],
)
def test_blocks_of_wide_heads_follow_from_the_memory_of_the_device(
    properties: dict[str, int], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(shared_memory_per_block=49152, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    find_chip.cache_clear()
    try:
        chip = find_chip(torch.device("cuda:0"))
    finally:
        find_chip.cache_clear()
    assert choose_blocks(256, torch.bfloat16, chip).forward.queries == queries
