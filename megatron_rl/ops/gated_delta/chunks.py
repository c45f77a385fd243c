"""The gated delta rule in chunks of rows, by public functions of torch.

Within a chunk, what tokens write to the state is the solution of a triangular system, with the state before the chunk
on its right side. So all chunks are solved at once, and only their states follow each other: each level of chunks is a
few products. The chunks of a segment follow each other, and the first ones of responses follow their prompt's last.

Write g for the log-decays, b for beta, and d_ij for the decay from token j to a later token i of the chunk. Token i
writes n_i = b_i (v_i - d_i0 S k_i - sum over j < i of d_ij (k_j k_i) n_j), with S the state before the chunk, and d_i0
the decay from there. Hence n = u - w S, where (1 + A) u = b v, (1 + A) w = b d_0 k, and A_ij = b_i d_ij (k_i k_j).

Parts of a forest, as chunks are, have at most one predecessor. A part's level is the number of parts before it in its
sequence. All parts of a level are computed at once, from the states after parts of the level before.

Letters: T tokens, N chunks, M chunks of a level, C rows of a chunk. G key heads, I value heads of a key head, D
dimensions of a query and a key, V of a value.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from megatron_rl.ops.backends import refuse_nothing
from megatron_rl.ops.shared_prompt.layout import ROOT, Layout
from megatron_rl.ops.shared_prompt.tables import find_tables

_CHUNK = 64
refusal = refuse_nothing


@dataclasses.dataclass(frozen=True)
class StateLevel:
    """The parts of one level."""

    num_parts: int
    above: torch.Tensor
    """For each part, the place of its predecessor's state among the `continued` of the level before."""
    continued: torch.Tensor
    """The places of the parts that have successors."""


def find_levels(predecessors: Sequence[int | None]) -> tuple[list[int], list[StateLevel]]:
    """Sort parts by level; return them, and the levels. A predecessor stands before its successors."""
    depths: list[int] = []
    for before in predecessors:
        depths.append(0 if before is None else depths[before] + 1)
    by_level: list[list[int]] = [[] for _ in range(max(depths, default=-1) + 1)]
    for part, depth in enumerate(depths):
        by_level[depth].append(part)
    has_successor = {before for before in predecessors if before is not None}
    levels: list[StateLevel] = []
    places: dict[int | None, int] = {}
    for parts in by_level:
        above = [places[predecessors[part]] for part in parts] if levels else []
        continued = [place for place, part in enumerate(parts) if part in has_successor]
        places = {parts[place]: number for number, place in enumerate(continued)}
        levels.append(
            StateLevel(len(parts), torch.tensor(above, dtype=torch.long), torch.tensor(continued, dtype=torch.long))
        )
    return [part for parts in by_level for part in parts], levels


def find_filled_parent(layout: Layout, segment: int) -> int:
    """Return the nearest ancestor that has tokens; ROOT if there is none."""
    parent = layout.parents[segment]
    while parent != ROOT and not layout.lengths[parent]:
        parent = layout.parents[parent]
    return parent


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a layout, level by level."""

    rows_NC: torch.Tensor
    """The row of each place; the number of tokens where a chunk has no row, in its last places."""
    places_T: torch.Tensor
    """The place of each row among all places."""
    levels: list[StateLevel]

    @classmethod
    def of(cls, layout: Layout) -> "Chunks":
        """Divide each segment into chunks."""
        starts = layout.starts.tolist()
        ranges: list[tuple[int, int]] = []
        predecessors: list[int | None] = []
        last_chunk: dict[int, int | None] = {ROOT: None}
        for segment, (start, end) in enumerate(itertools.pairwise(starts)):
            before = last_chunk[find_filled_parent(layout, segment)]
            for first in range(start, end, _CHUNK):
                predecessors.append(before)
                before = len(ranges)
                ranges.append((first, min(first + _CHUNK, end)))
            last_chunk[segment] = before
        order, levels = find_levels(predecessors)
        rows_NC = np.full((len(order), _CHUNK), layout.num_tokens, dtype=np.int64)
        places_T = np.zeros(layout.num_tokens, dtype=np.int64)
        for place, chunk in enumerate(order):
            first, end = ranges[chunk]
            rows_NC[place, : end - first] = np.arange(first, end)
            places_T[first:end] = np.arange(end - first) + place * _CHUNK
        return cls(torch.from_numpy(rows_NC), torch.from_numpy(places_T), levels)


def prepare(layout: Layout) -> Chunks:
    return layout.once(Chunks.of)


def rule(
    q_TGD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_THV: torch.Tensor,
    log_decay_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    layout: Layout,
) -> torch.Tensor:
    """Compute the same as `naive.rule`, in fp32 at least."""
    if layout.num_tokens == 0:
        return v_THV
    chunks = find_tables(layout, q_TGD.device, Chunks.of)
    num_groups, wide = q_TGD.shape[1], torch.promote_types(v_THV.dtype, torch.float32)
    q_NGCD, k_NGCD = (_gather(one, chunks.rows_NC, wide).movedim(2, 1) for one in (q_TGD, k_TGD))
    v_NGICV, g_NGIC, b_NGIC = (
        _gather(one, chunks.rows_NC, wide).movedim(1, 2).unflatten(1, (num_groups, -1))
        for one in (v_THV, log_decay_TH, beta_TH)
    )
    q_NGCD = q_NGCD * q_NGCD.shape[-1] ** -0.5
    decay_NGICC, from_start_NGIC = _compute_decays(g_NGIC)
    kk_NGCC, qk_NGCC = k_NGCD @ k_NGCD.mT, q_NGCD @ k_NGCD.mT
    # The solver reads what is below the diagonal.
    system_NGICC = b_NGIC.unsqueeze(-1) * decay_NGICC * kk_NGCC.unsqueeze(2)
    k_NG1CD, q_NG1CD = k_NGCD.unsqueeze(2), q_NGCD.unsqueeze(2)
    right_NGICX = torch.cat(
        (b_NGIC.unsqueeze(-1) * v_NGICV, (b_NGIC * from_start_NGIC).unsqueeze(-1) * k_NG1CD), dim=-1
    )
    solved_NGICX = torch.linalg.solve_triangular(system_NGICC, right_NGICX, upper=False, unitriangular=True)
    u_NGICV, w_NGICD = solved_NGICX.split((v_NGICV.shape[-1], k_NGCD.shape[-1]), dim=-1)
    out_NGICV = _pass_states(
        chunks.levels,
        u_NGICV,
        w_NGICD,
        from_start_NGIC.unsqueeze(-1) * q_NG1CD,
        decay_NGICC * qk_NGCC.unsqueeze(2),
        decay_NGICC[..., -1, :, None] * k_NG1CD,
        from_start_NGIC[..., -1, None, None],
    )
    out_NCGIV = out_NGICV.movedim(3, 1)
    return out_NCGIV.flatten(0, 1).flatten(1, 2).index_select(0, chunks.places_T).to(v_THV.dtype)


def _gather(rows: torch.Tensor, rows_NC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows of each chunk, [N, C, ...], and zeros where it has none."""
    wide = rows.to(dtype)
    filled = torch.cat((wide, wide.new_zeros(1, *wide.shape[1:])))
    return filled.index_select(0, rows_NC.flatten()).unflatten(0, rows_NC.shape)


def _compute_decays(g_NGIC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the decay from each token to each later one, 0 to an earlier one; and from before the chunk to each.

    Logarithms are summed from each token on, because differences of sums from the chunk's start would cancel. The sums
    are a product, because torch's running sums have no fixed order on CUDA.
    """
    length = g_NGIC.shape[-1]
    ones_CC = g_NGIC.new_ones(length, length).tril()
    sums_NGICC = ones_CC @ g_NGIC.unsqueeze(-1).expand(*g_NGIC.shape, length).tril(-1)
    from_start_NGIC = g_NGIC[..., :1] + sums_NGICC[..., 0]
    return sums_NGICC.masked_fill(ones_CC == 0, float("-inf")).exp(), from_start_NGIC.exp()


def _pass_states(
    levels: list[StateLevel],
    u_NGICV: torch.Tensor,
    w_NGICD: torch.Tensor,
    q_NGICD: torch.Tensor,
    qk_NGICC: torch.Tensor,
    k_NGICD: torch.Tensor,
    decay_NGI11: torch.Tensor,
) -> torch.Tensor:
    """Return what tokens read, chunk by chunk, and give each chunk's state to its successors.

    Queries are decayed from before the chunk, keys to its end.
    """
    sizes = [level.num_parts for level in levels]
    tensors = (u_NGICV, w_NGICD, q_NGICD, qk_NGICC, k_NGICD, decay_NGI11)
    states_MGIDV: torch.Tensor | None = None
    outs = []
    for level, u, w, q, qk, k, decay in zip(levels, *(one.split(sizes) for one in tensors), strict=True):
        if states_MGIDV is None:
            written, out = u, qk @ u
        else:
            states_MGIDV = states_MGIDV.index_select(0, level.above)
            written = u - w @ states_MGIDV
            out = q @ states_MGIDV + qk @ written
        outs.append(out)
        if not len(level.continued):
            continue
        k_written = k.index_select(0, level.continued).mT @ written.index_select(0, level.continued)
        if states_MGIDV is not None:
            before = states_MGIDV.index_select(0, level.continued)
            k_written = decay.index_select(0, level.continued) * before + k_written
        states_MGIDV = k_written
    return torch.cat(outs)
