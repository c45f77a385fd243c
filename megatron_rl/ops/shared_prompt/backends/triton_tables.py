"""The tables that `triton_kernels` look up for a layout: the rows that each program computes, and the rows it reads.

Each strand is cut into tiles of TILE rows, with fewer rows at its end. The queries of a tile attend to the ranges above
their strand, and to their strand up to themselves. Ranges of queries see the keys of a tile. Each such range is an
item, or several items if it is long. The results of items for the same keys are summed in the order of the items,
whichever of them is computed first.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np
import torch

from megatron_rl.ops.shared_prompt.layout import Layout, Rows, find_strands

# The same for all precisions and head dimensions: if programs have room for fewer rows, several share a tile.
TILE = 128
# An item has at most this fraction (1 / MOST_PARTS) of all items' length, unless it is short: parts must be summed.
MOST_PARTS = 256
SHORT_ITEM = 1024
# With less work, items are shorter, down to a tile. This number, for each head of keys and values, occupies a GPU.
FEW_PARTS = 64


@dataclasses.dataclass(frozen=True)
class TileTables:
    """Tables of int32, the longest work first. Rows are rows of the buffer, and an end is exclusive."""

    query_tiles: torch.Tensor
    """The first row; its strand's start and end; the first index and the end of its ranges above."""
    ranges: torch.Tensor
    """The start and end of each range."""
    key_items: torch.Tensor
    """The first key and number of keys; the queries' start and end; the slot of a partial sum, -1 for a lone item."""
    sums: torch.Tensor
    """The first key and number of keys of a tile with several items; the start and end of their slots."""
    positions_T: torch.Tensor
    """The position of each row; empty without a window."""
    num_slots: int
    tile: int
    window: int | None

    @classmethod
    def of(
        cls, layout: Layout, window: int | None = None, tile: int = TILE, short_item: int | None = None
    ) -> "TileTables":
        """Make all tables. Items of at most `short_item` queries are short; without it, the work decides.

        With a window the queries of an item belong to one strand, and some of them see a key of its tile.
        """
        cut = _Cut.of(layout, tile)
        numbers_T = np.zeros(0) if window is None else layout.positions
        *of_keys, num_slots = _make_key_items(cut, numbers_T, window, short_item)
        tables = (_make_query_tiles(cut), cut.ranges, *of_keys, numbers_T)
        query_tiles, ranges, key_items, sums, positions_T = (
            torch.from_numpy(np.ascontiguousarray(table, np.int32)) for table in tables
        )
        return cls(query_tiles, ranges, key_items, sums, positions_T, num_slots, tile, window)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Strands S, cut into tiles N, and the ranges A above all of them."""

    starts_S: np.ndarray
    ends_S: np.ndarray
    ranges: np.ndarray
    first_range_S: np.ndarray
    """The index of each strand's first range above; the last entry is the number of ranges."""
    num_tiles_S: np.ndarray
    strand_N: np.ndarray
    first_row_N: np.ndarray
    tile: int

    @classmethod
    def of(cls, layout: Layout, tile: int) -> "_Cut":
        found = find_strands(layout)
        starts_S, ends_S = _stack_rows([strand.rows for strand in found]).T
        num_ranges_S = np.array([len(strand.above) for strand in found], dtype=np.int64)
        num_tiles_S = _ceil_divide(ends_S - starts_S, tile)
        strand_N, number_N = _number_each(num_tiles_S)
        return cls(
            starts_S,
            ends_S,
            _stack_rows([rows for strand in found for rows in strand.above]),
            np.concatenate(([0], np.cumsum(num_ranges_S))),
            num_tiles_S,
            strand_N,
            starts_S[strand_N] + number_N * tile,
            tile,
        )

    @property
    def end_row_N(self) -> np.ndarray:
        return np.minimum(self.first_row_N + self.tile, self.ends_S[self.strand_N])


def _make_query_tiles(cut: _Cut) -> np.ndarray:
    strand_N, start_N = cut.strand_N, cut.starts_S[cut.strand_N]
    lengths_above = np.concatenate(([0], np.cumsum(cut.ranges[:, 1] - cut.ranges[:, 0])))
    keys_above_S = np.diff(lengths_above[cut.first_range_S])
    num_keys_N = keys_above_S[strand_N] + cut.first_row_N - start_N
    first_range_N, end_range_N = cut.first_range_S[strand_N], cut.first_range_S[strand_N + 1]
    table = np.stack([cut.first_row_N, start_N, cut.ends_S[strand_N], first_range_N, end_range_N], axis=1)
    return table[np.argsort(-num_keys_N, kind="stable")]


def _make_key_items(
    cut: _Cut, positions_T: np.ndarray, window: int | None, short_item: int | None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Make the tables of items and of sums, and count the slots."""
    views = _find_views(cut)
    views = _join_views(*views) if window is None else _trim_views(*views, positions_T, window)
    tile_I, start_I, end_I, end_key_I = _split(*views, cut.tile, short_item)
    num_items_N = np.bincount(tile_I, minlength=len(cut.first_row_N))
    is_partial_I = num_items_N[tile_I] > 1
    slot_I = np.where(is_partial_I, np.cumsum(is_partial_I) - 1, -1)
    first_key_I = cut.first_row_N[tile_I]
    items = np.stack([first_key_I, end_key_I - first_key_I, start_I, end_I, slot_I], axis=1)
    summed = np.flatnonzero(num_items_N > 1)
    end_slot = np.cumsum(num_items_N[summed])
    first_key = cut.first_row_N[summed]
    num_keys = cut.end_row_N[summed] - first_key
    sums = np.stack([first_key, num_keys, end_slot - num_items_N[summed], end_slot], axis=1)
    return items[np.argsort(start_I - end_I, kind="stable")], sums, int(is_partial_I.sum())


def _find_views(cut: _Cut) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """List the ranges of queries that see keys of each tile, up to some key: tile, start, end, the keys' end."""
    viewer_A = np.repeat(np.arange(len(cut.starts_S)), np.diff(cut.first_range_S))
    # A range begins at its strand's start.
    strand_A = np.searchsorted(cut.starts_S, cut.ranges[:, 0])
    first_tile_S = np.cumsum(cut.num_tiles_S) - cut.num_tiles_S
    range_V, number_V = _number_each(_ceil_divide(cut.ranges[:, 1] - cut.ranges[:, 0], cut.tile))
    tile_V = first_tile_S[strand_A[range_V]] + number_V
    # A tile's own strand comes first, and then the other strands that see it, in the order of their rows.
    tiles = np.concatenate([np.arange(len(cut.first_row_N)), tile_V])
    starts = np.concatenate([cut.first_row_N, cut.starts_S[viewer_A[range_V]]])
    ends = np.concatenate([cut.ends_S[cut.strand_N], cut.ends_S[viewer_A[range_V]]])
    end_keys = np.concatenate([cut.end_row_N, np.minimum(cut.end_row_N[tile_V], cut.ranges[range_V, 1])])
    order = np.argsort(tiles, kind="stable")
    return tiles[order], starts[order], ends[order], end_keys[order]


def _trim_views(
    tiles: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    end_keys: np.ndarray,
    positions_T: np.ndarray,
    window: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Leave out queries that come after the window of the last key that they would see."""
    seen = positions_T[end_keys - 1] + window - positions_T[starts]
    ends = np.minimum(ends, starts + seen)
    is_seen = starts < ends
    return tiles[is_seen], starts[is_seen], ends[is_seen], end_keys[is_seen]


def _join_views(
    tiles: np.ndarray, starts: np.ndarray, ends: np.ndarray, end_keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Join the ranges of adjacent strands that see the same keys."""
    is_next = (tiles[1:] != tiles[:-1]) | (starts[1:] != ends[:-1]) | (end_keys[1:] != end_keys[:-1])
    firsts = np.flatnonzero(np.concatenate(([True], is_next))[: len(tiles)])
    lasts = np.append(firsts[1:], len(tiles))[: len(firsts)] - 1
    return tiles[firsts], starts[firsts], ends[lasts], end_keys[firsts]


def _split(
    tiles: np.ndarray, starts: np.ndarray, ends: np.ndarray, end_keys: np.ndarray, tile: int, short_item: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split long ranges into equal parts. Each part except the last consists of whole tiles."""
    lengths = ends - starts
    total = int(lengths.sum())
    if short_item is None:
        short_item = min(SHORT_ITEM, _ceil_divide(total, FEW_PARTS))
    longest = max(short_item, _ceil_divide(total, MOST_PARTS))
    steps = _ceil_divide(_ceil_divide(lengths, _ceil_divide(lengths, longest)), tile) * tile
    whole, number = _number_each(_ceil_divide(lengths, steps))
    parts = starts[whole] + number * steps[whole]
    return tiles[whole], parts, np.minimum(parts + steps[whole], ends[whole]), end_keys[whole]


def _number_each(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the owner of each counted item, and the number of the owner's items before it."""
    owners = np.repeat(np.arange(len(counts)), counts)
    return owners, np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]


def _ceil_divide(numbers: Any, divisor: Any) -> Any:
    """Divide arrays or numbers, and round up."""
    return -(-numbers // divisor)


def _stack_rows(rows: list[Rows]) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64, 2 * len(rows)).reshape(-1, 2)
