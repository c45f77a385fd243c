"""A file of JSON lines that each name their version; a resumed run continues it as if it had never stopped.

Invariants:
- a line is appended whole and is with the kernel when `append` returns; a kill in between leaves it torn, and a torn
  last line is cut off when the file is opened again;
- versions never decrease from line to line, so what a resumed run drops is the end of the file, cut off in one step;
- one process writes; the file is readable by its owner only.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_rl.errors import InputError
from megatron_rl.records.append_file import AppendFile, FileInUse

_T = TypeVar("_T")


class _Versioned(msgspec.Struct):
    """What every line has; other keys are skipped."""

    version: int


class LineFile:
    """Open for appending until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = AppendFile(path)
        except FileInUse:
            raise FileInUse(
                f"{path} is written by another process: end that run, or give this one another folder"
            ) from None
        self._last_version: float = -math.inf
        try:
            self._keep_below(math.inf)
        except BaseException:
            self._file.close()
            raise

    def restart(self, version: int) -> int:
        """Drop the lines of this version and of later ones; returns how many there were."""
        return self._keep_below(version)

    def append(self, version: int, record: Mapping[str, Any]) -> None:
        """Write one line; AppendFailed, where the disk is full, leaves the file as it was."""
        if version < self._last_version:
            raise ValueError(
                f"{self.path}: version {version} after {self._last_version}: restart({version}) comes first"
            )
        text = json.dumps({"version": version, **record}, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair, which neither UTF-8 nor a strict reader of JSON takes, becomes a question mark.
        self._file.append(text.encode("utf-8", "replace") + b"\n")
        self._last_version = version

    def close(self) -> None:
        """A second call does nothing."""
        self._file.close()

    def _keep_below(self, bound: float) -> int:
        kept_bytes = num_dropped = 0
        self._last_version = -math.inf
        for number, line in _whole_lines(self.path):
            version = _decoded(self.path, number, line, _Versioned).version
            if num_dropped or version >= bound:
                num_dropped += 1
                continue
            kept_bytes += len(line)
            self._last_version = version
        self._file.cut(kept_bytes)
        return num_dropped


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file, which may be written to meanwhile: a last line that is not whole is left out."""
    try:
        lines = list(_whole_lines(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in lines:
        _decoded(path, number, line, _Versioned)
    return [_decoded(path, number, line, dict) for number, line in lines]


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _decoded(path: Path, number: int, line: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}, line {number}: {error}; mend the line, or move the file away") from None
