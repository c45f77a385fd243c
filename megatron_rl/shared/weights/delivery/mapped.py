"""The bytes of a version's files in this host's memory, as portions take them: block after block, copied by no one.

Rows that lie apart in the file are gathered into a block before they are sent, and spread after they are received: a
call for each of them would take longer than the copy.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_rl.shared.weights.delivery.messages import File, Portion, Strip

BLOCK_BYTES = 1 << 20
"""The bytes that are digested at once, few enough to be in the processor's cache when they are sent."""


class MappedFiles:
    def __init__(self, folder: Path, files: Sequence[File], is_written: bool = False):
        self._files = files
        self._bytes = [_map(folder / file.name, file.num_bytes, is_written) for file in files]

    def read(self, portion: Portion) -> Iterator[memoryview]:
        file = self._bytes[portion.file]
        for block in _divide(portion.strips):
            yield np.ascontiguousarray(_view(file, block)).reshape(-1).data

    def fill(self, portion: Portion, receive: Callable[[memoryview], None]) -> None:
        """Have `receive` fill the strips of a portion."""
        file = self._bytes[portion.file]
        for block in _divide(portion.strips):
            target = _view(file, block)
            if target.flags.c_contiguous:
                receive(target.reshape(-1).data)
                continue
            staged = np.empty(target.shape, np.uint8)
            receive(staged.reshape(-1).data)
            target[...] = staged


def identify(folder: Path, files: Sequence[File]) -> tuple[tuple[int, int], ...]:
    """Return what tells these files from any others: while they are mapped, no other file gets their numbers."""
    found = [os.stat(folder / file.name) for file in files]
    return tuple((status.st_dev, status.st_ino) for status in found)


def _map(path: Path, num_bytes: int, is_written: bool) -> np.ndarray:
    descriptor = os.open(path, os.O_RDWR if is_written else os.O_RDONLY)
    try:
        access = mmap.ACCESS_WRITE if is_written else mmap.ACCESS_READ
        return np.frombuffer(mmap.mmap(descriptor, num_bytes, access=access), np.uint8)
    finally:
        os.close(descriptor)


def _divide(strips: Sequence[Strip]) -> Iterator[Strip]:
    """Divide strips into blocks, each of adjacent bytes or of rows that lie apart."""
    for strip in strips:
        if strip.num_rows == 1 or strip.row_bytes == strip.pitch_bytes:
            for start in range(0, strip.num_bytes, BLOCK_BYTES):
                length = min(BLOCK_BYTES, strip.num_bytes - start)
                yield Strip(strip.first_byte + start, 1, length, length)
            continue
        step = max(1, BLOCK_BYTES // strip.row_bytes)
        for first in range(0, strip.num_rows, step):
            begin = strip.first_byte + first * strip.pitch_bytes
            yield Strip(begin, min(step, strip.num_rows - first), strip.row_bytes, strip.pitch_bytes)


def _view(file: np.ndarray, strip: Strip) -> np.ndarray:
    end = strip.first_byte + (strip.num_rows - 1) * strip.pitch_bytes + strip.row_bytes
    return np.lib.stride_tricks.as_strided(
        file[strip.first_byte : end], (strip.num_rows, strip.row_bytes), (strip.pitch_bytes, 1)
    )
