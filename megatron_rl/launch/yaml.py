"""Writes YAML for people: mappings and lists in blocks, texts of several lines as they are, all else as JSON."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# YAML reads such a word as itself; the words below would become something else.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./:-]*[A-Za-z0-9_/-]")
_TAKEN = {"true", "false", "null", "yes", "no", "on", "off"}
# A text as | takes it: its first line is not indented, and it ends with one line break.
_TEXT = re.compile(r"\S(.*\S)?\n", re.DOTALL)


def write_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the documents as one stream."""
    return "---\n".join("\n".join(_write_lines(document)) + "\n" for document in documents)


def _write_lines(value: Any) -> Iterator[str]:
    """Yield the lines of a block."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _write_entry(f"{_write_scalar(key)}:", inner)
    else:
        for inner in value:
            first, *others = _write_lines(inner) if _is_block(inner) else [_write_scalar(inner)]
            yield f"- {first}"
            yield from map(_indent, others)


def _write_entry(head: str, value: Any) -> Iterator[str]:
    if _is_block(value):
        yield head
        yield from map(_indent, _write_lines(value))
    elif isinstance(value, str) and _TEXT.fullmatch(value):
        yield f"{head} |"
        yield from map(_indent, value.split("\n")[:-1])
    else:
        yield f"{head} {_write_scalar(value)}"


def _indent(line: str) -> str:
    return f"  {line}" if line else line


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list) and bool(value)


def _write_scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _TAKEN:
        return value
    return json.dumps(value)
