"""The order in which parts of a forest of segments are computed: each after the one before it in its sequence.

A part has at most one predecessor. Its level is the number of parts before it. All parts of a level are computed at
once, from the states after parts of the level before.
"""

import dataclasses
from collections.abc import Sequence

import torch

from megatron_rl.ops.shared_prompt.layout import ROOT, Layout


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
