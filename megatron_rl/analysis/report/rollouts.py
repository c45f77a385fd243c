"""Chooses the groups of samples.jsonl that a report holds: all of a short run, and a fair choice of a long one.

The rule, which docs/metrics.md explains to its readers:

- a text of more than `MOST_CHARACTERS` loses its middle;
- versions take turns, and each takes its groups in the same random order of rows. So every version has some, and a
  prompt that is kept in one version is kept in the others that have it;
- groups are chosen until their texts fill the report's room.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.observe.samples import SampledTurn

MOST_CHARACTERS = 20_000
MOST_TOKENS = 5_000
"""The bound of tokens of a response whose tokens are known."""
MOST_TURNS = 200
"""The bound of turns of a conversation."""
MOST_BYTES = 10 << 20
"""The bound of bytes of all texts of a report. Even if they do not compress, a page stays below 20 MB."""
_NO_MIDDLE = "\n[… {count:,} characters are left out here …]\n"


class _Head(msgspec.Struct):
    """The values that identify a line; its texts are skipped."""

    version: int
    kind: str = "training"
    row: str = ""


class _Tokens(msgspec.Struct):
    texts: list[str]
    engine: list[float | None]
    trainer: list[float | None] | None = None


@dataclasses.dataclass(frozen=True)
class _SampleLine:
    offset: int
    num_bytes: int
    head: _Head


class SampleFile:
    """A file of samples that may grow. Each call of `update` reads the new lines, and keeps their places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[_SampleLine] = []
        self._end = 0
        self.num_unreadable = 0
        """The number of lines that are not JSON, or not samples."""

    def update(self) -> None:
        """Read the lines that were added. A file that has shrunk, as after a resume, is read from its begin."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = 0
        if size < self._end or not self._is_same_file():
            self._lines, self._end, self.num_unreadable = [], 0, 0
        if size == self._end:
            return
        with self.path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    # The line is still being written.
                    break
                head = _decode(line, _Head)
                if head is None:
                    self.num_unreadable += 1
                else:
                    self._lines.append(_SampleLine(self._end, len(line), head))
                self._end += len(line)

    def choose(self, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
        """Return the groups that the report holds, and the number of all groups."""
        chosen = _choose(self._lines, most_bytes)
        groups = [group for line in chosen if (group := self._read(line)) is not None]
        return {
            "groups": groups,
            "num_groups": len(self._lines),
            "num_unreadable": self.num_unreadable,
        }

    def _is_same_file(self) -> bool:
        """Check that the last known line is at its place, since a resumed run may have grown past it."""
        if not self._lines:
            return True
        last = self._lines[-1]
        with self.path.open("rb") as file:
            file.seek(last.offset)
            head = _decode(file.read(last.num_bytes), _Head)
        return head is not None and (head.version, head.row) == (last.head.version, last.head.row)

    def _read(self, line: _SampleLine) -> dict[str, Any] | None:
        with self.path.open("rb") as file:
            file.seek(line.offset)
            record = _decode(file.read(line.num_bytes), dict)
        return None if record is None else _shorten(record)


def _choose(lines: Iterable[_SampleLine], most_bytes: int) -> list[_SampleLine]:
    strata: dict[tuple[int, str], list[_SampleLine]] = {}
    for line in lines:
        strata.setdefault((line.head.version, line.head.kind), []).append(line)
    order = sorted(range(len(strata)), key=lambda place: f"{place:040b}"[::-1])
    turns = {place: turn for turn, place in enumerate(order)}
    candidates = [
        (round_number, turns[place], line)
        for place, stratum in enumerate(strata.values())
        for round_number, line in enumerate(sorted(stratum, key=lambda line: _draw(line.head.row)))
    ]
    chosen, room = [], most_bytes
    for _, _, line in sorted(candidates, key=lambda item: item[:2]):
        if line.num_bytes <= room:
            chosen.append(line)
            room -= line.num_bytes
    return sorted(chosen, key=lambda line: line.offset)


def _draw(row: str) -> bytes:
    return hashlib.blake2b(row.encode("utf-8", "replace"), digest_size=8).digest()


def _decode(line: bytes, kind: Any) -> Any:
    """Decode a line; return None if it is not JSON of this kind. Bytes that are not UTF-8 become U+FFFD."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        # Half of a surrogate pair is an error for msgspec alone.
        return msgspec.convert(json.loads(line.decode("utf-8", "replace")), type=kind)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None


def _shorten(record: Mapping[str, Any]) -> dict[str, Any]:
    responses = record.get("responses")
    return {
        "version": record.get("version"),
        "kind": record.get("kind", "training"),
        "row": shorten(record.get("row", "")),
        "prompt": shorten(record.get("prompt", "")),
        "responses": [_shorten_response(one) for one in responses if isinstance(one, Mapping)]
        if isinstance(responses, list)
        else [],
    }


def _shorten_response(response: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: response[name] for name in _FIELDS if response.get(name) not in (None, "")}
    tokens = _shorten_tokens(response.get("tokens"))
    said = _shorten_turns(response.get("turns")) or {"text": shorten(response.get("text", ""))}
    return {**kept, **said, **({} if tokens is None else {"tokens": tokens})}


def _shorten_turns(turns: Any) -> dict[str, Any] | None:
    """Return the first turns, in place of the text that they make together; None without turns."""
    try:
        known = msgspec.convert(turns, list[SampledTurn])
    except msgspec.ValidationError:
        return None
    if not known or any(turn.after is not None and turn.after.turn >= place for place, turn in enumerate(known)):
        return None
    kept = [
        {name: value for name, value in msgspec.to_builtins(turn).items() if value is not None}
        | {"text": shorten(turn.text)}
        for turn in known[:MOST_TURNS]
    ]
    num_turns = sum(turn.by == "policy" for turn in known)
    return {"turns": kept, "num_turns": num_turns, "num_left_out": len(known) - len(kept)}


def _shorten_tokens(tokens: Any) -> dict[str, Any] | None:
    """Return the first tokens with their log-probs; None without tokens."""
    try:
        known = msgspec.convert(tokens, _Tokens)
    except msgspec.ValidationError:
        return None
    if not len(known.texts) == len(known.engine) == len(known.trainer or known.engine):
        return None
    found = {name: value[:MOST_TOKENS] for name, value in msgspec.structs.asdict(known).items() if value is not None}
    return {**found, "num_left_out": max(0, len(known.texts) - MOST_TOKENS)}


_FIELDS = ("reward", "components", "num_tokens", "finish_reason", "failure", "advantage")


def shorten(text: Any, most: int = MOST_CHARACTERS) -> str:
    """Return the text, without its middle if it is too long."""
    text = text if isinstance(text, str) else json.dumps(text)
    if len(text) <= most:
        return text
    half = most // 2
    return text[:half] + _NO_MIDDLE.format(count=len(text) - 2 * half) + text[-half:]
