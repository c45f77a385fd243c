"""The batched calls that compute attention over a layout of equal groups.

A call is fast only if its shape is known: cuDNN makes a plan for each shape, which takes it tens of milliseconds, and
torch keeps the plan. So a layout is planned only if its strands are equally long wherever they see the same rows.

Letters: T tokens.
"""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Sequence

from megatron_rl.ops.shared_prompt.backends.flash_cpu import FlashCall, RowRanges
from megatron_rl.ops.shared_prompt.layout import Layout, Rows, find_strands

_log = logging.getLogger(__name__)
# Shorter strands make calls that are not worth their start, and cuDNN has none for a single key.
SHORTEST = 64
# The kinds of calls that a process makes, each with a plan for its forward and one for its backward.
MOST_KINDS = 64
_KINDS: set[FlashCall] = set()


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
