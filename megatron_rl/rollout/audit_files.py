"""The files of an audit log: `audit.jsonl`, then `audit-000001.jsonl` and so on, each begun when one is full."""

import re
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.errors import InputError

FILE_NAME = "audit.jsonl"
MAX_BYTES = 64 << 20


def file_of(first: Path, index: int) -> Path:
    """The file of that number; the first one has number 0 and the log's own name."""
    return first if index == 0 else first.with_name(f"{first.stem}-{index:06d}{first.suffix}")


def existing_files(first: Path) -> dict[int, Path]:
    """Those that are there, by their numbers, in order."""
    pattern = re.compile(rf"{re.escape(first.stem)}-(\d{{6,}}){re.escape(first.suffix)}")
    found = {0: first} if first.exists() else {}
    for path in first.parent.glob(f"{first.stem}-*{first.suffix}"):
        match = pattern.fullmatch(path.name)
        if match and file_of(first, index := int(match[1])) == path:
            found[index] = path
    return dict(sorted(found.items()))


def first_file(path: Path) -> Path:
    """The first file of the log that a person has named, by itself or by its folder."""
    return path / FILE_NAME if path.is_dir() else path


def files_to_read(first: Path) -> dict[int, Path]:
    """Those that are there; an InputError where there is none."""
    files = existing_files(first)
    if not files:
        raise InputError(f"{first}: No such file or directory; name the log, or the folder that holds {FILE_NAME}")
    return files


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines, with their newlines."""
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; name the log, or the folder that holds {FILE_NAME}") from None
