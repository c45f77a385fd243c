"""Sends other packages' warnings into a file of the run, so that they do not appear between lines of its display."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

FILE_NAME = "warnings.log"


@contextlib.contextmanager
def keep_warnings(path: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Within this context, append to the file what packages warn of or log as a warning.

    `say` is called once, at the first warning. If the file cannot be written, warnings go to standard error as usual.
    """
    handler = _File(path, say)
    root = logging.getLogger()
    logging.captureWarnings(True)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
        logging.captureWarnings(False)


class _File(logging.Handler):
    """Opens the file for each record: there are few, and several ranks append to one file."""

    def __init__(self, path: Path, say: Callable[[str], object]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        self._path = path
        self._say = say
        self._has_said = False

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{text}\n")
        except OSError:
            print(text, file=sys.stderr)
            return
        if not self._has_said:
            self._has_said = True
            self._say(f"other packages warn of something: {self._path} (--verbose shows it here)")
