"""The layout of a packed buffer, which decides which of its tokens see each other.

A buffer is a row of segments. Each segment has at most one parent, which stands before it. A token sees its own segment
up to itself, and all tokens of every ancestor. A prompt is a root, and its K responses are its children. A plain
sequence is a root alone. The turns of a conversation are a chain that may branch at the end of any segment. Positions
are counted along the chain, as if each path from root to leaf stood alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

ROOT = -1

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A forest of segments, in the order in which their tokens lie in the buffer."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    """The index of each segment's parent, always smaller than the segment's own; ROOT for none."""
    _kept: dict[tuple[Hashable, ...], Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.parents):
            raise ValueError(
                f"there must be one parent for each length: {len(self.parents)} parents, {len(self.lengths)} lengths"
            )
        for segment, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 0:
                raise ValueError(f"the length of segment {segment} must be at least 0, not {length}")
            if not ROOT <= parent < segment:
                raise ValueError(f"the parent of segment {segment} must be {ROOT} or an earlier segment, not {parent}")

    @classmethod
    def of_groups(cls, groups: Sequence[tuple[int, Sequence[int]]]) -> "Layout":
        """Lay out groups one after the other, each given as a prompt's length and its responses' lengths."""
        lengths: list[int] = []
        parents: list[int] = []
        for prompt_length, response_lengths in groups:
            prompt = len(lengths)
            lengths += [prompt_length, *response_lengths]
            parents += [ROOT] + [prompt] * len(response_lengths)
        return cls(tuple(lengths), tuple(parents))

    def once(self, make: Callable[..., T], *arguments: Hashable) -> T:
        """Return `make(layout, *arguments)`, called once and kept, because every layer asks for the same."""
        key = (make, *arguments)
        if key not in self._kept:
            self._kept[key] = make(self, *arguments)
        return cast(T, self._kept[key])

    def keep(self, made: Any, make: Callable[..., Any], *arguments: Hashable) -> None:
        """Keep the result of `make(layout, *arguments)` that was made elsewhere, for `once`."""
        self._kept[make, *arguments] = made

    @property
    def kept(self) -> Mapping[tuple[Hashable, ...], Any]:
        """The results that `once` keeps, by function and arguments."""
        return MappingProxyType(dict(self._kept))

    @property
    def num_segments(self) -> int:
        """The number of segments, including empty ones."""
        return len(self.lengths)

    @functools.cached_property
    def num_tokens(self) -> int:
        """The length of the buffer."""
        return sum(self.lengths)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first row of each segment; the last entry is the buffer's length."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))

    @functools.cached_property
    def first_positions(self) -> np.ndarray:
        """The position of each segment's first token: the number of tokens of all its ancestors."""
        first = np.zeros(self.num_segments, dtype=np.int64)
        for segment, parent in enumerate(self.parents):
            if parent != ROOT:
                first[segment] = first[parent] + self.lengths[parent]
        return first

    @functools.cached_property
    def segment_of_token(self) -> np.ndarray:
        """The segment that each token belongs to."""
        return np.repeat(np.arange(self.num_segments), self.lengths)

    @functools.cached_property
    def positions(self) -> np.ndarray:
        """The position of each token in its sequence."""
        offsets = self.first_positions - self.starts[:-1]
        return np.arange(self.num_tokens) + np.repeat(offsets, self.lengths)

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """The matrix [i, j] that tells whether segment j is segment i itself, or one of its ancestors."""
        matrix = np.eye(self.num_segments, dtype=bool)
        for segment, parent in enumerate(self.parents):
            if parent != ROOT:
                matrix[segment] |= matrix[parent]
        return matrix

    def visible(self, window: int | None = None) -> np.ndarray:
        """Compute the matrix [i, j] that tells whether token i sees token j.

        With a window, a token sees the last `window` positions only.
        """
        segments, tokens = self.segment_of_token, np.arange(self.num_tokens)
        mask = self.ancestors[segments[:, None], segments[None, :]]
        # Ancestors stand earlier in the buffer, so one comparison is enough for their tokens and the segment's own.
        mask &= tokens[None, :] <= tokens[:, None]
        if window is not None:
            mask &= self.positions[:, None] - self.positions[None, :] < window
        return mask

    def last_row(self, segment: int) -> int | None:
        """Return the row that predicts the token after a segment: its own or its nearest ancestor's last; else None."""
        while segment != ROOT:
            if self.lengths[segment]:
                return int(self.starts[segment + 1]) - 1
            segment = self.parents[segment]
        return None


class Rows(NamedTuple):
    """Consecutive rows of the buffer."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """The number of rows."""
        return self.end - self.start


class Strand(NamedTuple):
    """One causal sequence."""

    rows: Rows
    above: tuple[Rows, ...]
    """The ranges that all rows of the strand see besides the strand itself, the earliest position first."""

    @property
    def num_keys(self) -> int:
        """The number of rows that the strand's last row sees."""
        return self.rows.length + sum(rows.length for rows in self.above)


def find_strands(layout: Layout) -> list[Strand]:
    """Divide the buffer into strands, in the order of their rows."""
    starts = layout.starts.tolist()
    first_rows: list[int] = []
    end_rows: list[int] = []
    above: list[tuple[Rows, ...]] = []
    # For each segment, the place where its children attach: the strand, and the end of its rows that they see.
    tips: list[tuple[int, int] | None] = []
    # For each such place, the ranges that are seen from it. They are the same for all responses to a prompt.
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
