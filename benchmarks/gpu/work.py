"""The work of a part: its device, its model, the time that it has left, and the place for its rows."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu import models
from benchmarks.gpu.tables import TABLES, Row, append_row
from megatron_rl.types import Architecture


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one part. Times are those of `time.monotonic`."""

    rows: Path
    """The file that its rows are appended to."""
    folder: Path
    """The folder of the models, which parts share."""
    size: str
    """The size of its model; empty if it has none."""
    is_tiny: bool
    end: float
    """The time until which it may measure."""

    @property
    def device(self) -> str:
        return "cpu" if self.is_tiny else "cuda"

    @property
    def architecture(self) -> Architecture:
        return models.TINY if self.is_tiny else models.SIZES[self.size]

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def make_model(self) -> Path:
        """Return the folder of its model, which is made if no earlier part has made it."""
        name = "tiny" if self.is_tiny else self.size
        return models.make_once(self.folder / name, self.architecture, self.device)

    def add(self, table: str, name: str, note: str = "", **figures: float) -> None:
        """Add a row with figures, and print it."""
        assert figures.keys() <= TABLES[table].figures.keys(), figures
        append_row(self.rows, Row(table, name, figures, note))
        print(f"{table}: {name} is measured", flush=True)

    def leave_out(self, table: str, name: str, reason: str) -> None:
        """Add a row without figures."""
        self.add(table, name, reason)

    def has_time(self, table: str, name: str, seconds: float) -> bool:
        """Return whether this many seconds are left; leave the row out if not."""
        if self.seconds_left >= seconds:
            return True
        self.leave_out(table, name, "out of time")
        return False

    @contextlib.contextmanager
    def spared(self, table: str, name: str) -> Iterator[None]:
        """Leave the row out if it needs more memory than the GPU has; the next rows are measured."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.leave_out(table, name, f"out of memory: {' '.join(str(error).split())[:120]}")
        if self.device == "cuda":
            torch.cuda.empty_cache()
