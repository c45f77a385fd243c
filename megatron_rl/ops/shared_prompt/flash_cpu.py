"""The calls that a layout comes to on the CPU, and torch's flash operators for them.

Letters: T tokens, H heads, D head dimension, B sequences of a call; G key-value heads.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.shared_prompt.strands import Rows, strands

# What a call returns is merged while it is in the cache.
MOST_ROWS = 2048


class Call(NamedTuple):
    """Some rows attend to some rows: causally to themselves, or wholly to others."""

    queries: Rows
    keys: Rows
    num_sequences: int = 1
    """Of equal length, one behind the other."""

    @property
    def is_causal(self) -> bool:
        """Whether rows attend to themselves; no call has rows in common with its keys otherwise."""
        return self.queries == self.keys

    def cut(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Its rows of queries, keys and values."""
        ranges = (self.queries, self.keys, self.keys)
        return [_cut(tensor, rows, self.num_sequences) for tensor, rows in zip(inputs, ranges, strict=True)]


@dataclasses.dataclass(frozen=True)
class CpuFlash:
    """Attention in several calls, each row's results merged."""

    calls: tuple[Call, ...]
    """The causal ones, which have every row once, and then those to rows above."""

    @classmethod
    def of(cls, layout: Layout) -> "CpuFlash":
        """Neighbours of equal length share a causal call, and neighbours that see the same rows a call to these."""
        found = strands(layout)
        calls = []
        for length, group in itertools.groupby(
            (strand.rows for strand in found), key=lambda rows: rows.end - rows.start
        ):
            equal = list(group)
            at_a_time = max(1, MOST_ROWS // length)
            for first in range(0, len(equal), at_a_time):
                some = equal[first : first + at_a_time]
                rows = Rows(some[0].start, some[-1].end)
                calls.append(Call(rows, rows, len(some)))
        below: dict[Rows, list[list[int]]] = {}
        for (start, end), above in found:
            for keys in above:
                ranges = below.setdefault(keys, [[start, start]])
                if ranges[-1][1] == start:
                    ranges[-1][1] = end
                else:
                    ranges.append([start, end])
        calls += [
            Call(Rows(first, min(first + MOST_ROWS, end)), keys)
            for keys, ranges in below.items()
            for start, end in ranges
            for first in range(start, end, MOST_ROWS)
        ]
        return cls(tuple(calls))

    def alone(self, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, scale: float) -> torch.Tensor:
        """The only call there is, as torch itself differentiates it: nothing is merged."""
        (call,) = self.calls
        q_BHTD, k_BGTD, v_BGTD = (
            tensor.unflatten(0, (call.num_sequences, -1)).transpose(1, 2) for tensor in _widened(q_THD, k_TGD, v_TGD)
        )
        out_BHTD = F.scaled_dot_product_attention(
            q_BHTD,
            k_BGTD,
            v_BGTD,
            is_causal=True,
            scale=scale,
            enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
        )
        return _joined(out_BHTD).to(q_THD.dtype)

    def forward(
        self, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention, and the logarithm of each softmax's denominator [T, H]."""
        inputs = _widened(q_THD, k_TGD, v_TGD)
        out_THD = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        lse_TH = out_THD.new_empty(out_THD.shape[:2])
        for call in self.calls:
            rows = slice(*call.queries)
            # No names for parts: the next call finds their memory free, and still in the cache.
            _merge(call, out_THD[rows], lse_TH[rows], *_attend(call, inputs, scale))
        return out_THD.to(q_THD.dtype), lse_TH

    def backward(
        self,
        grad_out_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        scale: float,
    ) -> list[torch.Tensor]:
        """Gradients of queries, keys and values. `out_THD` and `lse_TH` are the merged ones."""
        inputs = _widened(q_THD, k_TGD, v_TGD)
        outputs = (*_widened(grad_out_THD, out_THD), lse_TH)
        sums = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
        for call in self.calls:
            _add(call, sums, _gradients(call, inputs, outputs, scale))
        return [total.to(q_THD.dtype) for total in sums]


def _attend(call: Call, inputs: Sequence[torch.Tensor], scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the call's queries alone. `inputs` are queries, keys and values of the buffer."""
    out_BHTD, lse_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *call.cut(inputs), 0.0, call.is_causal, scale=scale
    )
    return _joined(out_BHTD), _joined(lse_BHT)


def _gradients(
    call: Call, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], scale: float
) -> list[torch.Tensor]:
    """Of the call's queries, keys and values. `outputs` are the output's gradient, the output, the denominators."""
    grad_out_BHTD, out_BHTD, lse_BHT = (_cut(tensor, call.queries, call.num_sequences) for tensor in outputs)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out_BHTD, *call.cut(inputs), out_BHTD, lse_BHT, 0.0, call.is_causal, scale=scale
    )
    return [_joined(gradient_BHTD) for gradient_BHTD in gradients]


def _merge(
    call: Call, out_THD: torch.Tensor, lse_TH: torch.Tensor, part_THD: torch.Tensor, part_lse_TH: torch.Tensor
) -> None:
    """Average, by each one's share of the denominator; the causal call is every row's first."""
    if call.is_causal:
        out_THD.copy_(part_THD)
        lse_TH.copy_(part_lse_TH)
    else:
        out_THD.lerp_(part_THD, torch.sigmoid(part_lse_TH - lse_TH).unsqueeze(-1))
        torch.logaddexp(lse_TH, part_lse_TH, out=lse_TH)


def _add(call: Call, sums: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Add; the causal call is every row's first."""
    for total, part, rows in zip(sums, parts, (call.queries, call.keys, call.keys), strict=True):
        if call.is_causal:
            total[slice(*rows)] = part
        else:
            total[slice(*rows)] += part


def _widened(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In fp32 at least: in half precision the operator rounds sums over queries after each block of them."""
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _cut(tensor_TH: torch.Tensor, rows: Rows, num_sequences: int) -> torch.Tensor:
    """From [T, H, ...] to [B, H, T, ...], a view."""
    return tensor_TH[rows.start : rows.end].unflatten(0, (num_sequences, -1)).transpose(1, 2)


def _joined(tensor_BHT: torch.Tensor) -> torch.Tensor:
    """From [B, H, T, ...] to [T, H, ...], a view of what the operators return."""
    return tensor_BHT.transpose(1, 2).flatten(0, 1)
