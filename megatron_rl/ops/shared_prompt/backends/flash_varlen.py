"""The calls that compute attention over a layout on accelerators, with flash operators for sequences of any length.

One causal call has all strands. A second call has the first range above each of them, a third call has the second
ranges, and so on. Each of these calls has a row at most once.

Letters: T tokens, N rows of queries, M rows of keys, H query heads, G key-value heads, D head dimension, S sequences.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatron_rl.ops.shared_prompt.layout import Layout, Rows, find_strands

OPERATORS = torch.ops.aten
_NPU = "megatron_rl.ops.shared_prompt.backends.flash_npu"


@dataclasses.dataclass(frozen=True)
class SequenceOffsets:
    """The offsets at which sequences begin in a buffer; the last offset is the buffer's length."""

    offsets_S: torch.Tensor
    ends: list[int]
    """The offsets without the first one, on the host."""
    longest: int

    @classmethod
    def of(cls, lengths: list[int]) -> "SequenceOffsets":
        """Lay out sequences of these lengths, one after the other."""
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        return cls(torch.from_numpy(offsets), offsets[1:].tolist(), max(lengths, default=0))

    @property
    def num_rows(self) -> int:
        """The length of the buffer."""
        return self.ends[-1] if self.ends else 0


class VarlenCall(NamedTuple):
    """A call in which each sequence of queries attends to a sequence of keys."""

    queries: SequenceOffsets
    keys: SequenceOffsets
    is_causal: bool
    scale: float

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The offsets of queries and of keys, and the longest sequence of each, as operators want them."""
        return self.queries.offsets_S, self.keys.offsets_S, self.queries.longest, self.keys.longest


class Kernels(NamedTuple):
    """The two functions that compute a call."""

    attend: Callable[[Sequence[torch.Tensor], VarlenCall], tuple[torch.Tensor, torch.Tensor]]
    """Compute attention of queries, keys and values, and the logarithm of each softmax's denominator [H, N]."""
    differentiate: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], VarlenCall], list[torch.Tensor]]
    """Compute the gradients of these three from the output's gradient, the output and the logarithms."""


@dataclasses.dataclass(frozen=True)
class Level:
    """Rows that each see a whole range of rows above them. Rows that see the same range are one sequence."""

    query_rows_N: torch.Tensor
    key_rows_M: torch.Tensor
    queries: SequenceOffsets
    keys: SequenceOffsets


@dataclasses.dataclass(frozen=True)
class VarlenFlash:
    """Attention with one causal call and one call for each level, whose results are merged row by row."""

    strands: SequenceOffsets
    levels: tuple[Level, ...]
    kernels: Kernels

    @classmethod
    def of(cls, layout: Layout, kernels: Kernels) -> "VarlenFlash":
        """Plan the calls."""
        found = find_strands(layout)
        depth = max((len(strand.above) for strand in found), default=0)
        levels = []
        for level in range(depth):
            below: dict[Rows, list[Rows]] = {}
            for strand in found:
                if level < len(strand.above):
                    below.setdefault(strand.above[level], []).append(strand.rows)
            queries = [sum(rows.length for rows in ranges) for ranges in below.values()]
            levels.append(
                Level(
                    _list_rows([rows for ranges in below.values() for rows in ranges]),
                    _list_rows(list(below)),
                    SequenceOffsets.of(queries),
                    SequenceOffsets.of([rows.length for rows in below]),
                )
            )
        return cls(SequenceOffsets.of([strand.rows.length for strand in found]), tuple(levels), kernels)

    def forward(self, inputs: Sequence[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the logarithm of each softmax's denominator [H, T]."""
        q_THD, k_TGD, v_TGD = inputs
        out_THD, lse_HT = self.kernels.attend(inputs, VarlenCall(self.strands, self.strands, True, scale))
        if not self.levels:
            return out_THD, lse_HT
        wide_THD = out_THD.float()
        for level in self.levels:
            rows_N = level.query_rows_N
            q_NHD = q_THD.index_select(0, rows_N)
            k_MGD, v_MGD = (tensor.index_select(0, level.key_rows_M) for tensor in (k_TGD, v_TGD))
            call = VarlenCall(level.queries, level.keys, False, scale)
            more_NHD, more_lse_HN = self.kernels.attend((q_NHD, k_MGD, v_MGD), call)
            before_HN = lse_HT.index_select(1, rows_N)
            share_NH1 = torch.sigmoid(more_lse_HN - before_HN).T.unsqueeze(-1)
            merged_NHD = torch.lerp(wide_THD.index_select(0, rows_N), more_NHD.float(), share_NH1)
            wide_THD.index_copy_(0, rows_N, merged_NHD)
            lse_HT.index_copy_(1, rows_N, torch.logaddexp(before_HN, more_lse_HN))
        return wide_THD.to(q_THD.dtype), lse_HT

    def backward(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
    ) -> list[torch.Tensor]:
        """Return the gradients of queries, keys and values from the output's, and from the merged results."""
        grad_out_THD, out_THD, lse_HT = outputs
        parts = self.kernels.differentiate(inputs, outputs, VarlenCall(self.strands, self.strands, True, scale))
        if not self.levels:
            return parts
        sums = [part.float() for part in parts]
        for level in self.levels:
            places = (level.query_rows_N, level.key_rows_M, level.key_rows_M)
            rows = [tensor.index_select(0, place) for tensor, place in zip(inputs, places, strict=True)]
            of_queries = [tensor.index_select(0, level.query_rows_N) for tensor in (grad_out_THD, out_THD)]
            call = VarlenCall(level.queries, level.keys, False, scale)
            lse_HN = lse_HT.index_select(1, level.query_rows_N)
            parts = self.kernels.differentiate(rows, (*of_queries, lse_HN), call)
            for total, part, place in zip(sums, parts, places, strict=True):
                # A level has a row of queries once. A row of keys may be in several ranges, with different ends.
                total.index_add_(0, place, part.float())
        return [total.to(inputs[0].dtype) for total in sums]


def attend(inputs: Sequence[torch.Tensor], call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
    out_NHD, lse_HN, *_ = OPERATORS._flash_attention_forward(
        *inputs, *call.bounds, 0.0, call.is_causal, False, scale=call.scale
    )
    return out_NHD, lse_HN


def differentiate(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], call: VarlenCall
) -> list[torch.Tensor]:
    grad_out_NHD, *results = outputs
    device = grad_out_NHD.device
    # The operator requires the random state of dropout, which is not used.
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    found = OPERATORS._flash_attention_backward(
        grad_out_NHD, *inputs, *results, *call.bounds, 0.0, call.is_causal, *no_dropout, scale=call.scale
    )
    return list(found)


TORCH = Kernels(attend, differentiate)


def find_kernels(device: str) -> Kernels:
    """Return torch's operators, or torch_npu's on an NPU, which only such a run imports."""
    return importlib.import_module(_NPU).KERNELS if device == "npu" else TORCH


def _list_rows(ranges: list[Rows]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.arange(*rows) for rows in ranges]))
