"""The messages of a delivery: typed and versioned. What a receiver is told is checked before a file is touched."""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from megatron_rl.errors import MegatronRLError

PROTOCOL = 2
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")


class DeliveryError(MegatronRLError):
    """A version cannot be delivered to a host."""


class Refused(DeliveryError):
    """The other end refuses, and asking again does not help."""


class Strip(msgspec.Struct, frozen=True, array_like=True):
    """Rows of bytes in a file, at equal distances."""

    first_byte: int
    num_rows: int
    row_bytes: int
    pitch_bytes: int
    """The bytes from row to row."""

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


class Portion(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of one file that travel together, in the order of their strips."""

    file: int
    """The number of the file in the version's list."""
    writer: int
    """The number of the rank that owns them, among those that write."""
    strips: tuple[Strip, ...]
    elements: tuple[tuple[int, int], ...]
    """The numbers of tensors, and how many elements of each the portion has."""

    @property
    def num_bytes(self) -> int:
        return sum(strip.num_bytes for strip in self.strips)


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file of a version: its header is given, and portions fill the rest."""

    name: str
    num_bytes: int
    header: bytes


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that is the same for every version of a run."""

    files: tuple[File, ...]
    tensors: tuple[str, ...]
    """The names of the tensors, sorted."""
    num_writers: int
    portions: tuple[Portion, ...]

    @property
    def sizes(self) -> dict[str, int]:
        return {file.name: file.num_bytes for file in self.files}

    @property
    def headers(self) -> dict[str, bytes]:
        return {file.name: file.header for file in self.files}

    def check(self) -> None:
        """Raise unless the portions cover each byte of each file after its header once."""
        strips: list[list[Strip]] = [[] for _ in self.files]
        for portion in self.portions:
            if not (0 <= portion.file < len(self.files) and 0 <= portion.writer < self.num_writers):
                raise Refused("a portion names a file or a rank that the version does not have")
            file = self.files[portion.file]
            if not all(_lies_in(strip, file) for strip in portion.strips):
                raise Refused(f"a portion lies outside of {file.name}")
            if not all(0 <= tensor < len(self.tensors) and number > 0 for tensor, number in portion.elements):
                raise Refused("a portion names a tensor that the version does not have")
            strips[portion.file] += portion.strips
        for file, its_strips in zip(self.files, strips, strict=True):
            if not _FILE_NAME.fullmatch(file.name):
                raise Refused(f"{file.name!r} must be the plain name of a .safetensors file")
            _must_cover(its_strips, file)


def _lies_in(strip: Strip, file: File) -> bool:
    if min(strip.num_rows, strip.row_bytes) < 1 or strip.pitch_bytes < strip.row_bytes:
        return False
    end = strip.first_byte + (strip.num_rows - 1) * strip.pitch_bytes + strip.row_bytes
    return len(file.header) <= strip.first_byte and end <= file.num_bytes


def _must_cover(strips: Sequence[Strip], file: File) -> None:
    """Raise unless the rows, in the order of their places, follow one another from the header to the end."""
    starts = [np.arange(strip.num_rows) * strip.pitch_bytes + strip.first_byte for strip in strips]
    lengths = [np.full(strip.num_rows, strip.row_bytes) for strip in strips]
    start = np.concatenate([*starts, [file.num_bytes]])
    order = np.argsort(start, kind="stable")
    end = np.concatenate([[len(file.header)], (start + np.concatenate([*lengths, [0]]))[order[:-1]]])
    wrong = np.flatnonzero(start[order] != end)
    if wrong.size:
        what = "twice" if start[order][wrong[0]] < end[wrong[0]] else "not at all"
        byte = min(start[order][wrong[0]], end[wrong[0]])
        raise Refused(f"the portions cover byte {byte} of {file.name} {what}: the ranks must own each element once")


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host to deliver to, as errors name it, and where its receiver listens."""

    name: str
    address: str
    port: int


class Begin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a version on a host."""

    digests: bytes
    """The text of the file of digests."""
    children: tuple[Target, ...]
    """The hosts that this host forwards portions to."""
    num_streams: int
    contents: Contents


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a connection."""

    purpose: Literal["control", "stream"]
    run: str
    lease: int
    """The number of the trainer's lease: a later trainer has a larger one."""
    version: int
    fingerprint: str
    sender: str
    """The sender, as the receiver's errors name it."""


def pack_numbers(numbers: Sequence[bool]) -> bytes:
    """Pack the portions that a host holds into bits."""
    return np.packbits(np.array(numbers, bool), bitorder="little").tobytes()


def unpack_numbers(packed: bytes, count: int) -> set[int]:
    """Return the numbers of the bits that are set."""
    if len(packed) != (count + 7) // 8:
        raise Refused(f"the list of portions has {len(packed)} bytes, and {count} portions need {(count + 7) // 8}")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little")
    return set(np.flatnonzero(bits).tolist())
