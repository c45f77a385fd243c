"""Attention of each query to the keys of its own sequence, in blocks that are counted from the sequence's begin.

Queries are computed in tiles: some rows of one sequence. A query's result is the same in every tile, in a tile of its
own too, and whatever keys other tiles have. So an engine that reads a prompt in parts and samples token by token gives
a row the bits of a trainer with whole packs, shared prompts included.

Letters: R rows of queries, N rows of keys, H query heads, G key-value heads, I = H / G. D head dimension, V that of
values, W = D + V, S sequences, L positions, P tiles. Q rows of a tile, B blocks of keys, C keys of a block, M = Q x I.
"""

import dataclasses
from collections.abc import Iterator

import torch

from megatron_rl.ops.invariant.rows import add_in_pairs

NUM_QUERIES = 4
NUM_KEYS = 64
"""The keys of a block; it divides the blocks of an engine's cache."""
_MOST_ELEMENTS = 1 << 20
"""The most numbers of a step's keys, so that they stay in the cache."""


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles that have each query once, those with few blocks of keys first."""

    rows_PQ: torch.Tensor
    """The row of each query; any row where a tile has fewer."""
    positions_PQ: torch.Tensor
    """The position of each query, and 0 where a tile has fewer."""
    sequences_P: torch.Tensor
    num_blocks: tuple[int, ...]
    """The blocks of keys that each tile sees."""
    places_R: torch.Tensor
    """The place of each row among all tiles' queries."""

    @classmethod
    def of(cls, sequences_R: torch.Tensor, positions_R: torch.Tensor) -> "Tiles":
        """Cut rows into tiles; those of a sequence must stand together, in the order of their positions."""
        sequences, counts = torch.unique_consecutive(sequences_R, return_counts=True)
        num_tiles = (counts + NUM_QUERIES - 1) // NUM_QUERIES
        sequences_P = sequences.repeat_interleave(num_tiles)
        ends = counts.cumsum(0)
        tile_of_sequence = torch.arange(len(sequences_P)) - (num_tiles.cumsum(0) - num_tiles).repeat_interleave(
            num_tiles
        )
        first_P = (ends - counts).repeat_interleave(num_tiles) + tile_of_sequence * NUM_QUERIES
        rows_PQ = first_P[:, None] + torch.arange(NUM_QUERIES)
        is_real_PQ = rows_PQ < ends.repeat_interleave(num_tiles)[:, None]
        rows_PQ = rows_PQ.where(is_real_PQ, first_P[:, None])
        positions_PQ = positions_R[rows_PQ].where(is_real_PQ, 0)
        num_blocks_P = positions_PQ.amax(dim=1) // NUM_KEYS + 1
        order_P = num_blocks_P.argsort(stable=True)
        places_R = torch.empty_like(positions_R)
        is_real_PQ = is_real_PQ[order_P]
        rows_PQ = rows_PQ[order_P]
        places_R[rows_PQ[is_real_PQ]] = is_real_PQ.flatten().nonzero()[:, 0]
        num_blocks = tuple(num_blocks_P[order_P].tolist())
        return cls(rows_PQ, positions_PQ[order_P], sequences_P[order_P], num_blocks, places_R)

    def steps(self, width: int) -> Iterator[tuple[slice, int]]:
        """Yield runs of tiles, each with the most blocks that a tile sees; `width` is the numbers of a block."""
        start = 0
        for tile, num_blocks in enumerate(self.num_blocks):
            if tile > start and (tile + 1 - start) * num_blocks * width > _MOST_ELEMENTS:
                yield slice(start, tile), self.num_blocks[tile - 1]
                start = tile
        if self.num_blocks:
            yield slice(start, len(self.num_blocks)), self.num_blocks[-1]


def pad_keys(length: int) -> int:
    """Return the length of a table of keys for sequences of at most this length."""
    return -(-length // NUM_KEYS) * NUM_KEYS


def attend(
    q_RHD: torch.Tensor, keys_and_values_NGW: torch.Tensor, tiles: Tiles, keys_SL: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the averages of values [R, H, V], and the logarithm of each softmax's denominator [R, H], in fp32.

    A row of keys and values has a key's columns first. `keys_SL` names the row of each position's key. After a
    sequence's end it names a row of the same sequence. Its length is a multiple of NUM_KEYS.
    """
    outs, sums = [], []
    num_groups, width = keys_and_values_NGW.shape[1:]
    rows_NW, groups_G1 = keys_and_values_NGW.view(-1, width), torch.arange(num_groups)[:, None]
    for step, num_blocks in tiles.steps(NUM_KEYS * num_groups * width):
        keys_PL = keys_SL[tiles.sequences_P[step], : num_blocks * NUM_KEYS]
        keys_PBGC = keys_PL.unflatten(1, (num_blocks, 1, NUM_KEYS)) * num_groups + groups_G1
        chosen_PBGCW = rows_NW.index_select(0, keys_PBGC.flatten()).view(*keys_PBGC.shape, width)
        out_PQHV, lse_PQH = _attend(q_RHD[tiles.rows_PQ[step]], chosen_PBGCW.float(), tiles.positions_PQ[step], scale)
        outs.append(out_PQHV.flatten(0, 1))
        sums.append(lse_PQH.flatten(0, 1))
    return torch.cat(outs)[tiles.places_R].to(q_RHD.dtype), torch.cat(sums)[tiles.places_R]


def _attend(
    q_PQHD: torch.Tensor, keys_and_values_PBGCW: torch.Tensor, positions_PQ: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _, num_queries, num_heads, head_dim = q_PQHD.shape
    shape = keys_and_values_PBGCW.shape[:3]
    _, num_blocks, num_groups = shape
    per_group = num_heads // num_groups
    keys, values = (one.flatten(0, 2) for one in keys_and_values_PBGCW.tensor_split((head_dim,), dim=-1))
    q_P1GMD = q_PQHD.float().unflatten(2, (num_groups, per_group)).transpose(1, 2).flatten(2, 3).unsqueeze(1)
    queries = q_P1GMD.expand(-1, num_blocks, -1, -1, -1).flatten(0, 2)
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(scale)
    scores_PBGQIC = scores.view(*shape, num_queries, per_group, NUM_KEYS)
    columns_BC = torch.arange(num_blocks * NUM_KEYS).view(num_blocks, NUM_KEYS)
    is_later_PBQC = columns_BC[None, :, None] > positions_PQ[:, None, :, None]
    scores_PBGQIC.masked_fill_(is_later_PBQC[:, :, None, :, None], float("-inf"))
    largest_P1GQI1 = scores_PBGQIC.amax(dim=(1, 5), keepdim=True)
    shares_PBGQIC = scores_PBGQIC.sub_(largest_P1GQI1).exp_()
    sum_PGQI = _add_blocks(add_in_pairs(shares_PBGQIC))
    parts = torch.bmm(shares_PBGQIC.flatten(3, 4).flatten(0, 2), values)
    total_PGQIV = _add_blocks(parts.view(*shape, num_queries, per_group, -1))
    out_PGQIV = total_PGQIV / sum_PGQI[..., None]
    lse_PGQI = largest_P1GQI1[:, 0, ..., 0] + sum_PGQI.log()
    return out_PGQIV.transpose(1, 2).flatten(2, 3), lse_PGQI.transpose(1, 2).flatten(2, 3)


def _add_blocks(parts_PB: torch.Tensor) -> torch.Tensor:
    """Add the blocks in their order; blocks that a query does not see add zeros."""
    first, *others = parts_PB.unbind(1)
    total = first.clone()
    for part in others:
        total += part
    return total
