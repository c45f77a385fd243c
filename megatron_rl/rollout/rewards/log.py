"""The file that what reward functions print goes to."""

from pathlib import Path

_MOST_BYTES = 16 << 20


class OutputLog:
    """Appends to a file until it has taken 16 MiB, says so, and drops the rest; drops everything without a file."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("ab", buffering=0)
        self._left = _MOST_BYTES

    def write(self, piece: bytes) -> None:
        if self._file is None or self._left <= 0:
            return
        self._left -= len(piece)
        self._file.write(piece)
        if self._left <= 0:
            self._file.write(b"\n[16 MiB were printed; what follows is dropped]\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
