"""A layout as the fewest causal sequences: what every backend but the naive one computes by.

A strand is a segment, its first child, that one's first child, and so on, as long as each lies right behind the one
before. Its rows see each other causally; beside them it sees whole ranges of rows, one of each strand that it hangs
from: that strand's rows up to the end of the segment where it branches off. A group of a prompt and K responses has K
strands: the prompt with its first response, and the others, each of which sees the prompt. Empty segments are in none.
"""

from typing import NamedTuple

from megatron_rl.ops.shared_prompt.layout import ROOT, Layout


class Rows(NamedTuple):
    """Rows of the buffer that follow each other."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """How many there are."""
        return self.end - self.start


class Strand(NamedTuple):
    """One causal sequence."""

    rows: Rows
    above: tuple[Rows, ...]
    """What all of its rows see beside themselves, the earliest position first."""

    @property
    def num_keys(self) -> int:
        """How many rows its last row sees."""
        return self.rows.length + sum(rows.length for rows in self.above)


def strands(layout: Layout) -> list[Strand]:
    """In the order of their rows, which together are the buffer."""
    starts = layout.starts.tolist()
    first_rows: list[int] = []
    end_rows: list[int] = []
    above: list[tuple[Rows, ...]] = []
    # Of each segment, where its children hang: the strand, and the row behind the last one that they see of it.
    tips: list[tuple[int, int] | None] = []
    # What hangs there sees: the same for all of a prompt's responses.
    seen_from: dict[tuple[int, int] | None, tuple[Rows, ...]] = {None: ()}
    for start, end, parent in zip(starts, starts[1:], layout.parents, strict=False):
        tip = tips[parent] if parent != ROOT else None
        if start == end:
            tips.append(tip)
            continue
        if tip is not None and tip[1] == start:
            end_rows[tip[0]] = end
            tips.append((tip[0], end))
            continue
        if tip is not None and tip not in seen_from:
            seen_from[tip] = (*above[tip[0]], Rows(first_rows[tip[0]], tip[1]))
        above.append(seen_from[tip])
        tips.append((len(first_rows), end))
        first_rows.append(start)
        end_rows.append(end)
    return [Strand(Rows(start, end), seen) for start, end, seen in zip(first_rows, end_rows, above, strict=True)]
