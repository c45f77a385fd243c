"""The places of a run's ranks: rank 0 receives them from all, and writes them into the run's folder for people."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.records.append_file import write_private

FILE_NAME = "ranks.json"


class RankPlace(msgspec.Struct, frozen=True):
    """The place of a rank when the file was written."""

    host: str
    part: str
    """The part of an iteration that the rank was in."""
    seconds: float
    """Seconds since it was first seen there."""


class ReadPlaces(NamedTuple):
    """The content of a run's file."""

    ranks: dict[int, RankPlace]
    """The places of all ranks that have reported, by rank."""
    seconds: float
    """Seconds since the file was written."""


class RankPlaces:
    """The last known place of every rank, on rank 0; any thread may call each method."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Write into the run's folder."""
        self._path = folder / FILE_NAME
        self._clock = clock
        self._reported: dict[int, tuple[str, int, str, float]] = {}

    def note(self, rank: int, host: str, num_steps: int, part: str) -> None:
        """Note that a rank is in this part of an iteration, after `num_steps` steps."""
        known = self._reported.get(rank)
        if known is None or known[:3] != (host, num_steps, part):
            self._reported[rank] = (host, num_steps, part, self._clock())

    def write(self) -> None:
        """Write the file, unless the disk refuses: the run's own files say so, and nothing depends on this one."""
        now = self._clock()
        places = {
            str(rank): RankPlace(host, part, round(now - since, 1))
            for rank, (host, _, part, since) in sorted(self._reported.items())
        }
        with contextlib.suppress(OSError, MegatronRLError):
            write_private(self._path, msgspec.json.encode(places))

    def remove(self) -> None:
        """Remove the file, since no rank reports any more."""
        self._path.unlink(missing_ok=True)


def read_places(folder: Path) -> ReadPlaces | None:
    """Read a run's file; return None if no ranks write there."""
    path = folder / FILE_NAME
    try:
        content, written = path.read_bytes(), path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        places = msgspec.convert(json.loads(content), dict[str, RankPlace])
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return ReadPlaces({int(rank): place for rank, place in places.items()}, time.time() - written)
