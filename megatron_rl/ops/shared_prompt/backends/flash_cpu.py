"""The calls that compute attention over a layout on the CPU, with torch's flash operators.

The operators compute 512 keys at a time, masked or not. In a causal call, that is up to twice the work. So a long
causal call is cut into tiles: causal tiles on the diagonal, and unmasked tiles below it.

Letters: T tokens, H heads, D head dimension, B sequences of a call, R rows of each; G key-value heads.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_rl.ops.shared_prompt.layout import Layout, Rows, find_strands

# So few rows that the results of a call are merged while they are in the cache.
MOST_ROWS = 2048
TILE = 128


class RowRanges(NamedTuple):
    """Ranges of rows, equally long and equally far apart."""

    start: int
    length: int
    number: int = 1
    stride: int = 0

    def view(self, tensor_TH: torch.Tensor) -> torch.Tensor:
        """View a tensor [T, H, ...] as [B, R, H, ...]."""
        assert self.start + (self.number - 1) * self.stride + self.length <= tensor_TH.shape[0]
        row, *rest = tensor_TH.stride()
        return tensor_TH.as_strided(
            (self.number, self.length, *tensor_TH.shape[1:]),
            (self.stride * row, row, *rest),
            tensor_TH.storage_offset() + self.start * row,
        )

    def part(self, start: int, end: int) -> "RowRanges":
        """Return the rows from `start` to `end` of each range."""
        return RowRanges(self.start + start, end - start, self.number, self.stride)

    def cut(self, length: int) -> list["RowRanges"]:
        """Cut each range in two after `length` rows; return adjacent halves as one RowRanges with twice the number."""
        if self.length == 2 * length and (self.number == 1 or self.stride == self.length):
            return [RowRanges(self.start, length, 2 * self.number, length)]
        return [self.part(0, length), self.part(length, self.length)]


class FlashCall(NamedTuple):
    """A call in which rows attend causally to themselves, or to all of some other rows."""

    queries: RowRanges
    keys: RowRanges

    @property
    def is_causal(self) -> bool:
        """Whether rows attend to themselves; in any other call, queries and keys share no row."""
        return self.queries == self.keys

    @property
    def is_tile(self) -> bool:
        """Whether one call of the operator computes this call, without cutting."""
        return not self.is_causal or self.queries.length <= 1.5 * TILE

    def tiles(self) -> Iterator["FlashCall"]:
        """Yield the tiles of this call. The causal tiles have every row once, before any other tile has the row."""
        if self.is_tile:
            yield self
            return
        length = self.queries.length
        half = TILE * 2 ** round(math.log2(length / (2 * TILE)))
        for sequences in self.queries.cut(half):
            yield from FlashCall(sequences, sequences).tiles()
        yield FlashCall(self.queries.part(half, length), self.queries.part(0, half))

    def views(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return views of the call's rows of queries, keys and values: [B, H, R, D]."""
        ranges = (self.queries, self.keys, self.keys)
        return [rows.view(tensor).transpose(1, 2) for tensor, rows in zip(tensors, ranges, strict=True)]


@dataclasses.dataclass(frozen=True)
class CpuFlash:
    """Attention in several calls, each row's results merged."""

    calls: tuple[FlashCall, ...]
    """The causal calls first, which have every row once, and then the calls to rows above."""

    @classmethod
    def of(cls, layout: Layout) -> "CpuFlash":
        """Plan the calls.

        Consecutive strands of equal length share a causal call. Consecutive strands that see the same rows share a call
        to these rows.
        """
        batches: list[list[int]] = []
        below: dict[Rows, list[list[int]]] = {}
        first, length, count = 0, 0, 0
        for (start, end), above in find_strands(layout):
            if end - start == length and (count + 1) * length <= MOST_ROWS:
                count += 1
            else:
                batches.append([first, length, count])
                first, length, count = start, end - start, 1
            for keys in above:
                ranges = below.setdefault(keys, [[start, start]])
                if ranges[-1][1] == start:
                    ranges[-1][1] = end
                else:
                    ranges.append([start, end])
        batches.append([first, length, count])
        # The first entry is empty: the search starts with it.
        causal = (RowRanges(first, length, count, length) for first, length, count in batches[1:])
        calls = [FlashCall(sequences, sequences) for sequences in causal]
        calls += [
            FlashCall(RowRanges(first, min(MOST_ROWS, end - first)), RowRanges(keys.start, keys.end - keys.start))
            for keys, ranges in below.items()
            for start, end in ranges
            for first in range(start, end, MOST_ROWS)
        ]
        return cls(tuple(calls))

    @property
    def is_plain(self) -> bool:
        """Whether one call of the operator computes everything."""
        return len(self.calls) == 1 and self.calls[0].is_tile

    def tiles(self) -> Iterator[FlashCall]:
        """Yield the calls of the operator."""
        return itertools.chain.from_iterable(call.tiles() for call in self.calls)

    def alone(self, inputs: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """Make the only call, which torch differentiates itself, since no results are merged."""
        (call,) = self.calls
        q_BHRD, k_BGRD, v_BGRD = (
            tensor.unflatten(0, (call.queries.number, -1)).transpose(1, 2) for tensor in _widen(*inputs)
        )
        has_groups = q_BHRD.shape[1] != k_BGRD.shape[1]
        out_BHRD = F.scaled_dot_product_attention(
            q_BHRD, k_BGRD, v_BGRD, is_causal=True, scale=scale, enable_gqa=has_groups
        )
        return out_BHRD.transpose(1, 2).flatten(0, 1).to(inputs[0].dtype)

    def forward(self, inputs: Sequence[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the logarithm of each softmax's denominator [T, H]."""
        dtype, inputs = inputs[0].dtype, _widen(*inputs)
        out_THD = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        lse_TH = out_THD.new_empty(out_THD.shape[:2])
        for call in self.tiles():
            # Parts have no names here, so that the next call reuses their memory while it is in the cache.
            _merge(call, call.queries.view(out_THD), call.queries.view(lse_TH), *_attend(call, inputs, scale))
        return out_THD.to(dtype), lse_TH

    def backward(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
    ) -> list[torch.Tensor]:
        """Return the gradients of queries, keys and values from the output's, and from the merged results."""
        *results, lse_TH = outputs
        dtype, inputs, outputs = inputs[0].dtype, _widen(*inputs), (*_widen(*results), lse_TH)
        sums = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
        for call in self.tiles():
            _add(call, sums, _gradients(call, inputs, outputs, scale))
        return [total.to(dtype) for total in sums]


def _attend(call: FlashCall, inputs: Sequence[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the call's queries, [B, R, H, ...]. `inputs` are queries, keys and values of the whole buffer."""
    out_BHRD, lse_BHR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *call.views(inputs), 0.0, call.is_causal, scale=scale
    )
    return out_BHRD.transpose(1, 2), lse_BHR.transpose(1, 2)


def _gradients(
    call: FlashCall, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
) -> list[torch.Tensor]:
    """Compute gradients of the call's queries, keys and values.

    `outputs` are the output's gradient, the output, and the denominators.
    """
    grad_out_BHRD, out_BHRD, lse_BHR = (call.queries.view(tensor).transpose(1, 2) for tensor in outputs)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out_BHRD, *call.views(inputs), out_BHRD, lse_BHR, 0.0, call.is_causal, scale=scale
    )
    return [gradient_BHRD.transpose(1, 2) for gradient_BHRD in gradients]


def _merge(
    call: FlashCall, out_BRHD: torch.Tensor, lse_BRH: torch.Tensor, part_BRHD: torch.Tensor, part_lse_BRH: torch.Tensor
) -> None:
    """Average results, weighted by shares of the denominator; every row's first call is the causal one."""
    if call.is_causal:
        out_BRHD.copy_(part_BRHD)
        lse_BRH.copy_(part_lse_BRH)
    else:
        out_BRHD.lerp_(part_BRHD, torch.sigmoid(part_lse_BRH - lse_BRH).unsqueeze(-1))
        torch.logaddexp(lse_BRH, part_lse_BRH, out=lse_BRH)


def _add(call: FlashCall, sums: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Add the parts to the sums; every row's first call is the causal one."""
    for total, part, rows in zip(sums, parts, (call.queries, call.keys, call.keys), strict=True):
        if call.is_causal:
            rows.view(total).copy_(part)
        else:
            rows.view(total).add_(part)


def _widen(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Convert to at least fp32: in half precision the operator rounds sums over queries after each block of queries."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
