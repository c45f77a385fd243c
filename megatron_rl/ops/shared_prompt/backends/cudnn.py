"""Shared-prompt attention of equal groups by cuDNN's attention: few batched calls, joined by a kernel of our own.

Strands of equal length attend causally in one call, and all responses of a group attend to their prompt in another. A
row's two results are joined by their shares of the full softmax's denominator. A call's backward gets the joined
results in place of its own, and computes its part of the full gradients; a number has two parts at most.

A call is fast only if its shape is known: cuDNN makes a plan for each shape, which takes it tens of milliseconds, and
torch keeps the plan. So a layout is planned only if its strands are equally long wherever they see the same rows. Packs
of unequal groups go through `triton`, and so do packs that would need more kinds of calls than there are plans for.

Letters: T tokens, B sequences of a call, R rows of each, M keys of each, N rows of all sequences, H query heads, G
key-value heads, D head dimension.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron_rl.ops.backends import Conditions
from megatron_rl.ops.shared_prompt.backends import make_rows_dense, triton_fused
from megatron_rl.ops.shared_prompt.backends.flash_cpu import FlashCall, RowRanges
from megatron_rl.ops.shared_prompt.backends.triton_tables import TileTables
from megatron_rl.ops.shared_prompt.layout import Layout, Rows, find_strands
from megatron_rl.ops.shared_prompt.tables import find_tables
from megatron_rl.ops.triton_support import launch, refuse_triton

_log = logging.getLogger(__name__)
OPERATORS = torch.ops.aten
# Shorter strands make calls that are not worth their start, and cuDNN has none for a single key.
SHORTEST = 64
# The kinds of calls that a process makes, each with a plan for its forward and one for its backward.
MOST_KINDS = 64
_KINDS: set[FlashCall] = set()
# Rows of heads begin at multiples of 16 bytes.
_MULTIPLE = 8
# Wider heads have kernels on compute capability 9.0 alone, from this version of cuDNN on.
NARROW, WIDE_CAPABILITY, WIDE_VERSION = 128, (9, 0), 91000
# The rows of a program that joins results, and its warps.
ROWS, NUM_WARPS = 32, 4


@dataclasses.dataclass(frozen=True)
class CudnnCalls:
    """Causal calls, which have every row once, and calls of what rows see above them, which have a row at most once."""

    causal: tuple[FlashCall, ...]
    above: tuple[FlashCall, ...]
    """The queries of a range are the strands of one causal call, and its keys begin with the keys of another one."""

    @classmethod
    def of(cls, layout: Layout) -> "CudnnCalls | None":
        """Plan the calls; return None for a layout that takes too many, or calls of too many kinds.

        Kinds that were planned before are taken at any time, and others while there are fewer than MOST_KINDS.
        """
        planned = cls._plan(layout)
        if planned is None or not _admit({_describe_kind(call) for call in (*planned.causal, *planned.above)}):
            return None
        return planned

    @classmethod
    def _plan(cls, layout: Layout) -> "CudnnCalls | None":
        below: dict[Rows, list[Rows]] = {}
        tops: list[tuple[Rows, ...]] = []
        for strand in find_strands(layout):
            if strand.rows.length < SHORTEST or len(strand.above) > 1:
                return None
            if strand.above:
                below.setdefault(strand.above[0], []).append(strand.rows)
            else:
                tops.append((strand.rows,))
        is_seen_once = len({keys.start for keys in below}) == len(below)
        if not tops or not is_seen_once or not all(map(_is_even, below.items())):
            return None
        causal = [FlashCall(ranges, ranges) for (ranges,) in _batch(tops)]
        for siblings in below.values():
            causal += [FlashCall(ranges, ranges) for (ranges,) in _batch([(rows,) for rows in siblings])]
        above = _batch([(Rows(rows[0].start, rows[-1].end), keys) for keys, rows in below.items()])
        return cls(tuple(causal), tuple(FlashCall(queries, keys) for queries, keys in above))


def _is_even(seen: tuple[Rows, list[Rows]]) -> bool:
    """Check that strands which see the same rows lie side by side and are equally long."""
    keys, strands = seen
    is_adjacent = all(one.end == other.start for one, other in itertools.pairwise(strands))
    return keys.length >= SHORTEST and is_adjacent and len({rows.length for rows in strands}) == 1


def _batch(listed: Sequence[tuple[Rows, ...]]) -> list[tuple[RowRanges, ...]]:
    """Batch neighbours of the list that are equally long and equally far apart, in each of their places."""
    batches: list[tuple[RowRanges, ...]] = []
    for several in listed:
        if batches and all(_continues(ranges, rows) for ranges, rows in zip(batches[-1], several, strict=True)):
            batches[-1] = tuple(_extend(ranges, rows) for ranges, rows in zip(batches[-1], several, strict=True))
        else:
            batches.append(tuple(RowRanges(rows.start, rows.length, 1, rows.length) for rows in several))
    return batches


def _continues(ranges: RowRanges, rows: Rows) -> bool:
    is_next = rows.start == ranges.start + ranges.number * ranges.stride
    # The second one decides how far apart they are, and must come later.
    is_second = ranges.number == 1 and rows.start > ranges.start
    return ranges.length == rows.length and (is_next or is_second)


def _extend(ranges: RowRanges, rows: Rows) -> RowRanges:
    stride = rows.start - ranges.start if ranges.number == 1 else ranges.stride
    return RowRanges(ranges.start, ranges.length, ranges.number + 1, stride)


def _describe_kind(call: FlashCall) -> FlashCall:
    """Return what cuDNN's plan of a call depends on, besides the tensors: the call without its place."""
    queries, keys = (ranges._replace(start=0) for ranges in call)
    # Distinct calls of one shape may differ in the mask alone.
    return FlashCall(queries, keys if call.is_causal else keys._replace(start=1))


def _admit(kinds: set[FlashCall]) -> bool:
    """Count new kinds of calls, unless they are too many."""
    if len(_KINDS | kinds) > MOST_KINDS:
        _say_full()
        return False
    _KINDS.update(kinds)
    return True


@functools.cache
def _say_full() -> None:
    _log.warning("attention has plans for %d kinds of calls; packs that need more go through triton", len(_KINDS))


def refusal(conditions: Conditions) -> str | None:
    """Refuse what `triton` does, other devices than NVIDIA's, fp32, and heads that cuDNN has no kernels for."""
    if conditions.device != "cuda" or torch.version.hip is not None:
        return f"cuDNN does not run on {'AMD GPUs' if conditions.device == 'cuda' else conditions.device}"
    if not conditions.is_half:
        return "it needs --bf16 or --fp16"
    if conditions.window is not None:
        return "it has no sliding window"
    if conditions.has_sinks:
        return "it has no sinks"
    if conditions.has_other_values:
        return f"values must be as wide as keys, not {conditions.value_dim} beside {conditions.head_dim}"
    if conditions.head_dim is not None and conditions.head_dim % _MULTIPLE:
        return f"the width of heads must be a multiple of {_MULTIPLE}, and the model's are {conditions.head_dim} wide"
    if not torch.backends.cudnn.is_available():
        return "this torch has no cuDNN"
    if conditions.head_dim is not None and conditions.head_dim > NARROW and not _has_wide_heads():
        return f"cuDNN has no heads wider than {NARROW} here, and the model's are {conditions.head_dim} wide"
    return triton_fused.refusal(conditions)


def _has_wide_heads() -> bool:
    version = torch.backends.cudnn.version() or 0
    return version >= WIDE_VERSION and torch.cuda.get_device_capability() == WIDE_CAPABILITY


def prepare(layout: Layout, device: torch.device, window: int | None = None) -> CudnnCalls | TileTables:
    """Return the calls that compute attention over the layout, or the tables of `triton`."""
    return layout.once(CudnnCalls.of) or triton_fused.prepare(layout, device)


def attention(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: Layout,
    scale: float,
    window: int | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `naive.attention`, without a window or sinks."""
    assert window is None
    assert sinks_H is None
    calls = find_tables(layout, q_THD.device, CudnnCalls.of)
    if calls is None:
        return triton_fused.attention(q_THD, k_TGD, v_TGD, layout, scale)
    out_THD: torch.Tensor = _Joined.apply(q_THD, k_TGD, v_TGD, calls, scale)
    return out_THD


class AttentionPart(NamedTuple):
    """A result of attention over a part of the keys, densely in memory."""

    out_NHD: torch.Tensor
    lse: torch.Tensor
    """The logarithm of each softmax's denominator in fp32: [B, H, R], or [H, N] from a call with all rows at once."""


class _Attended(NamedTuple):
    """The results of a forward call, and what its backward needs besides them."""

    out_BHRD: torch.Tensor
    lse: torch.Tensor
    """[B, H, R], or [B, H, R, 1] in some versions of torch."""
    rest: tuple[Any, ...]

    def part(self, number: int | None = None) -> AttentionPart:
        """Return the result of all sequences, or of one alone."""
        out_BRHD = self.out_BHRD.transpose(1, 2)
        lse_BHR = self.lse.reshape(self.lse.shape[:3])
        if number is None:
            return AttentionPart(out_BRHD.flatten(0, 1).contiguous(), lse_BHR.contiguous())
        return AttentionPart(out_BRHD[number].contiguous(), lse_BHR[number].contiguous())


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, calls: CudnnCalls, scale: float
    ) -> torch.Tensor:
        inputs = [make_rows_dense(tensor) for tensor in (q_THD, k_TGD, v_TGD)]
        out_THD = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        causal = {call.queries.start: _attend(call, inputs, scale) for call in calls.causal}
        above = [_attend(call, inputs, scale) for call in calls.above]
        joined = _join_all(calls, causal, above, out_THD)
        for call in calls.causal:
            if call.queries.start not in joined:
                call.queries.view(out_THD).copy_(causal[call.queries.start].out_BHRD.transpose(1, 2))
        lses = [joined.get(start, attended.lse) for start, attended in causal.items()]
        ctx.save_for_backward(*inputs, out_THD, *lses, *(attended.lse for attended in above))
        ctx.rests = [attended.rest for attended in (*causal.values(), *above)]
        ctx.calls, ctx.scale = calls, scale
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_out_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        *inputs, out_THD = ctx.saved_tensors[:4]
        calls: CudnnCalls = ctx.calls
        # A plan of torch's is kept for the layout of queries, keys and values, and reads the others as the first time.
        outputs = (grad_out_THD.contiguous(), out_THD)
        parts = [
            _differentiate(call, inputs, outputs, lse, rest, ctx.scale)
            for call, lse, rest in zip((*calls.causal, *calls.above), ctx.saved_tensors[4:], ctx.rests, strict=True)
        ]
        num_causal = len(calls.causal)
        sums = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs]
        for number, total in enumerate(sums):
            added = {
                start: part_RHD
                for call, of_call in zip(calls.above, parts[num_causal:], strict=True)
                for start, part_RHD in _divide(call[min(number, 1)], of_call[number])
            }
            for call, of_call in zip(calls.causal, parts[:num_causal], strict=True):
                _add_up(call.queries, total, of_call[number], added)
        return (*sums, None, None)


def _join_all(
    calls: CudnnCalls, causal: dict[int, _Attended], above: Sequence[_Attended], out_THD: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Join what strands see above them with their own results; return their joined logarithms by their first row.

    The logarithms of the calls in `above` become the joined ones.
    """
    joined = {}
    for call, attended in zip(calls.above, above, strict=True):
        for number, (start, end) in enumerate(_list_bounds(call.queries)):
            own = causal[start]
            joined[start] = torch.empty_like(own.lse, memory_format=torch.contiguous_format)
            of_above = attended.part(number)
            lse_BHR = joined[start].view(joined[start].shape[:3])
            join(own.part(), of_above, out_THD[start:end], lse_BHR, attended.lse[number].view(of_above.lse.shape))
    return joined


def _attend(call: FlashCall, inputs: Sequence[torch.Tensor], scale: float) -> _Attended:
    out_BHRD, lse, *rest = OPERATORS._scaled_dot_product_cudnn_attention(
        *call.views(inputs), None, True, 0.0, call.is_causal, False, scale=scale
    )
    return _Attended(out_BHRD, lse.contiguous(), tuple(rest))


def _differentiate(
    call: FlashCall,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    lse: torch.Tensor,
    rest: Sequence[Any],
    scale: float,
) -> list[torch.Tensor]:
    """Compute the call's part of the gradients, [B, R, H, D] and twice [B, M, G, D].

    `outputs` are the output's gradient and the joined output.
    """
    grad_out_BHRD, out_BHRD = (call.queries.view(tensor).transpose(1, 2) for tensor in outputs)
    ends_q, ends_k, longest_q, longest_k, seed, offset = rest[:6]
    found = OPERATORS._scaled_dot_product_cudnn_attention_backward(
        grad_out_BHRD, *call.views(inputs), out_BHRD, lse, seed, offset, None,
        ends_q, ends_k, longest_q, longest_k, 0.0, call.is_causal, scale=scale,
    )  # fmt: skip
    return [part.transpose(1, 2) for part in found]


def _list_bounds(ranges: RowRanges) -> list[tuple[int, int]]:
    firsts = [ranges.start + number * ranges.stride for number in range(ranges.number)]
    return [(first, first + ranges.length) for first in firsts]


def _divide(ranges: RowRanges, part_BRHD: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return the parts of the sequences, each with its first row."""
    return [(start, part_BRHD[number]) for number, (start, _) in enumerate(_list_bounds(ranges))]


def _add_up(rows: RowRanges, total_THD: torch.Tensor, part_BRHD: torch.Tensor, added: dict[int, torch.Tensor]) -> None:
    """Write the gradients of a causal call's rows: its own part, and the part of rows that another call has too."""
    whole = added.get(rows.start)
    if whole is not None and len(whole) == rows.number * rows.length:
        # All strands that see the same rows.
        torch.add(part_BRHD.flatten(0, 1), whole, out=total_THD[rows.start : rows.start + len(whole)])
        return
    if all(start not in added for start, _ in _list_bounds(rows)):
        rows.view(total_THD).copy_(part_BRHD)
        return
    for (start, end), part_RHD in zip(_list_bounds(rows), part_BRHD, strict=True):
        # The first rows of a strand may be seen by others.
        num_seen = len(added.get(start, ()))
        if num_seen:
            torch.add(part_RHD[:num_seen], added[start], out=total_THD[start : start + num_seen])
        total_THD[start + num_seen : end].copy_(part_RHD[num_seen:])


def join(
    own: AttentionPart,
    above: AttentionPart,
    out_NHD: torch.Tensor,
    own_joined: torch.Tensor,
    above_joined: torch.Tensor,
) -> None:
    """Write the joined output, and its logarithms twice: as those of `own` lie, and as those of `above` do."""
    if refuse_triton(out_NHD.device.type, out_NHD.dtype) is not None:
        join_plainly(own, above, out_NHD, own_joined, above_joined)
        return
    from megatron_rl.ops.shared_prompt.backends.triton_kernels import join_results_kernel

    num_rows, num_heads, head_dim = out_NHD.shape
    launch(
        join_results_kernel,
        (-(-num_rows // ROWS), num_heads),
        own.out_NHD,
        above.out_NHD,
        own.lse,
        above.lse,
        out_NHD,
        own_joined,
        above_joined,
        num_rows,
        own.lse.shape[-1],
        HEAD_DIM=head_dim,
        WIDTH=triton_fused.compute_width(head_dim),
        ROWS=ROWS,
        num_warps=NUM_WARPS,
    )


def join_plainly(
    own: AttentionPart,
    above: AttentionPart,
    out_NHD: torch.Tensor,
    own_joined: torch.Tensor,
    above_joined: torch.Tensor,
) -> None:
    """Write the same by torch's operations."""
    own_HN = own.lse.transpose(0, 1).flatten(1)
    joined_HN = torch.logaddexp(own_HN, above.lse)
    own_share_NH1, above_share_NH1 = ((lse - joined_HN).exp().T.unsqueeze(-1) for lse in (own_HN, above.lse))
    out_NHD.copy_(own.out_NHD.float() * own_share_NH1 + above.out_NHD.float() * above_share_NH1)
    above_joined.copy_(joined_HN)
    own_joined.copy_(joined_HN.unflatten(1, (own.lse.shape[0], -1)).transpose(0, 1))
