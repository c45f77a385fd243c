"""Unified diffs whose hunks are found by their text, never by their line numbers.

Invariants:
- a hunk is applied only where its old lines stand, all of them, once in the file;
- applying a diff and then its reverse gives the same bytes.
"""

import dataclasses
import re
from collections.abc import Sequence

from megatron_rl.errors import InputError

_HEADER = re.compile(r"@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@")
_NO_NEWLINE = "\\ No newline at end of file\n"


@dataclasses.dataclass(frozen=True)
class Hunk:
    """Lines that replace others; both include the unchanged lines around them."""

    number: int
    old: str
    new: str

    @property
    def anchor(self) -> str:
        """The first line that must be there, for people."""
        return next((line for line in self.old.splitlines() if line.strip()), "an empty line")


def read_hunks(text: str) -> list[Hunk]:
    """Read the hunks of a diff of one file."""
    lines = text.splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if _HEADER.match(line)]
    ends = [*starts[1:], len(lines)]
    return [
        _read_hunk(number, lines[start + 1 : end])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1)
    ]


def _read_hunk(number: int, lines: Sequence[str]) -> Hunk:
    old: list[str] = []
    new: list[str] = []
    sides: tuple[list[str], ...] = ()
    for line in lines:
        if line == _NO_NEWLINE:
            # This refers to the line before.
            for side in sides:
                side[-1] = side[-1].removesuffix("\n")
            continue
        sides = {"-": (old,), "+": (new,)}.get(line[0], (old, new))
        for side in sides:
            side.append(line[1:])
    return Hunk(number, "".join(old), "".join(new))


def reverse(hunks: Sequence[Hunk]) -> list[Hunk]:
    """Return the hunks that undo these."""
    return [Hunk(hunk.number, hunk.new, hunk.old) for hunk in hunks]


def apply(text: str, hunks: Sequence[Hunk], name: str) -> str:
    """Return the text of the file `name` after the hunks; raise an InputError that names a hunk that does not fit."""
    for hunk in hunks:
        place = _find(text, hunk, name)
        text = text[:place] + hunk.new + text[place + len(hunk.old) :]
    return text


def fits(text: str, hunks: Sequence[Hunk]) -> bool:
    """Whether every hunk fits in exactly one place."""
    return all(_count(text, hunk) == 1 for hunk in hunks)


def _find(text: str, hunk: Hunk, name: str) -> int:
    count = _count(text, hunk)
    if count != 1:
        where = "is not there" if count == 0 else f"is there {count} times"
        raise InputError(
            f"{name} has moved: the text of hunk {hunk.number}, which begins with {hunk.anchor!r}, {where}; "
            "put the file back to the one that the patch is for, or make the change by hand"
        )
    return _places(text, hunk)[0]


def _count(text: str, hunk: Hunk) -> int:
    return len(_places(text, hunk))


def _places(text: str, hunk: Hunk) -> list[int]:
    """Find where the old lines stand as whole lines."""
    pattern = re.compile(rf"^(?={re.escape(hunk.old)})", re.MULTILINE)
    return [match.start() for match in pattern.finditer(text)]
