"""The file that what reward functions print goes to."""

import logging
from pathlib import Path

_LOGGER = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20


class OutputLog:
    """Appends to a file until it has taken 16 MiB or has no room, says so, drops the rest; drops all without one."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("ab", buffering=0)
        self._left = _MOST_BYTES

    def write(self, piece: bytes) -> None:
        if self._file is None or self._left <= 0:
            return
        self._left -= len(piece)
        try:
            self._file.write(piece)
            if self._left <= 0:
                self._file.write(b"\n[16 MiB were printed; what follows is dropped]\n")
        except OSError as error:
            # Rewards go on without it: whoever prints must be read, or waits for ever.
            self._left = 0
            _LOGGER.warning(
                "%s cannot be written: %s; what reward functions print is dropped", self._file.name, error.strerror
            )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
