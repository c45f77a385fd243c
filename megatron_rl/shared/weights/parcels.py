"""The order in which a rank's slices leave it: in parcels, each packed on a device and copied at once, or sent.

A parcel has the next bytes of one file, up to a limit, in the file's order. What lies together in the file lies
together in the parcel, so a rank that writes whole files sends one run of bytes a parcel. Invariants, over a rank's
parcels:

- each element that the rank owns is in one parcel, once;
- a parcel's parts follow each other without gaps, and their bytes go to the places of their elements in the file.

Letters: R rows, C columns of a part seen as a matrix.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_rl.ops.slices import Slice
from megatron_rl.shared.weights.delivery.messages import Contents, File, Portion, Strip
from megatron_rl.shared.weights.files import FilePlan
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import Piece
from megatron_rl.shared.weights.shards import Shard

MOST_BYTES = 1 << 28


class Part(NamedTuple):
    """Some rows of a piece, packed into a parcel."""

    shard: int
    """The number of the shard among the rank's."""
    piece: Piece
    first_row: int
    """The first of the rows, counted in the piece."""
    num_rows: int
    row_bytes: int
    first_byte: int
    """The place in the parcel."""
    file_byte: int
    """The place of the first row in the file."""
    pitch_bytes: int
    """The bytes from row to row in the file."""

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def is_run(self) -> bool:
        """Return whether the rows lie one after the other in the file too."""
        return self.row_bytes == self.pitch_bytes or self.num_rows == 1

    def values(self, shards: Sequence[Shard]) -> torch.Tensor:
        """Return the part's elements, as a view of its parameter."""
        values_RC = view_piece(shards[self.shard], self.piece)
        return values_RC[self.first_row : self.first_row + self.num_rows]


@dataclasses.dataclass(frozen=True)
class Parcel:
    """Parts of one file."""

    file: str
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def list_strips(self) -> list[Strip]:
        """List the parts, joining those that lie together in the file; the parcel has their bytes in this order."""
        strips: list[Strip] = []
        for part in self.parts:
            length = part.num_bytes
            if not part.is_run:
                strips.append(Strip(part.file_byte, part.num_rows, part.row_bytes, part.pitch_bytes))
                continue
            last = strips[-1] if strips else None
            if last is not None and last.num_rows == 1 and last.first_byte + last.row_bytes == part.file_byte:
                length += last.row_bytes
                strips[-1] = Strip(last.first_byte, 1, length, length)
            else:
                strips.append(Strip(part.file_byte, 1, length, length))
        return strips

    def count_bytes(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for part in self.parts:
            counts[part.piece.name] = counts.get(part.piece.name, 0) + part.num_bytes
        return counts


def plan_parcels(shards: Sequence[Shard], plan: FilePlan, most_bytes: int = MOST_BYTES) -> list[Parcel]:
    """Divide what the rank owns into parcels of at most `most_bytes`, or of one row if a row is larger."""
    places = {file: number for number, file in enumerate(plan.sizes)}
    wholes = [_place_piece(number, shard, piece, plan) for number, shard, piece in _list_owned(shards)]
    wholes.sort(key=lambda whole: (places[plan.offsets[whole.piece.name][0]], whole.file_byte))
    parcels: list[Parcel] = []
    filled: list[Part] = []
    file, used = "", 0

    def close() -> None:
        nonlocal used
        if filled:
            parcels.append(Parcel(file, tuple(filled)))
            filled.clear()
        used = 0

    for whole in wholes:
        if plan.offsets[whole.piece.name][0] != file:
            close()
            file = plan.offsets[whole.piece.name][0]
        done = 0
        while done < whole.num_rows:
            fitting = (most_bytes - used) // whole.row_bytes
            if fitting <= 0 and filled:
                close()
                continue
            part = whole._replace(
                first_row=done,
                num_rows=min(max(1, fitting), whole.num_rows - done),
                first_byte=used,
                file_byte=whole.file_byte + done * whole.pitch_bytes,
            )
            filled.append(part)
            used += part.num_bytes
            done += part.num_rows
    close()
    return parcels


def list_slices(shards: Sequence[Shard], tensors: Sequence[str]) -> list[Slice]:
    """List what the rank owns as slices of these tensors."""
    numbers = {name: number for number, name in enumerate(tensors)}
    slices = []
    for _, shard, piece in _list_owned(shards):
        first_row, first_column = (piece.source, 0) if piece.dim == 0 else (0, piece.source)
        slices.append(Slice(view_piece(shard, piece), numbers[piece.name], first_row, first_column))
    return slices


def view_piece(shard: Shard, piece: Piece) -> torch.Tensor:
    """View a piece of a shard as a matrix."""
    values = shard.parameter.detach().narrow(piece.dim, piece.target, piece.length)
    return values.view(values.shape[0], -1)


def _list_owned(shards: Sequence[Shard]) -> Iterator[tuple[int, Shard, Piece]]:
    for number, shard in enumerate(shards):
        for piece in shard.map.pieces if shard.map.owned else ():
            yield number, shard, piece


def _place_piece(number: int, shard: Shard, piece: Piece, plan: FilePlan) -> Part:
    spec = plan.specs[piece.name]
    _, start = plan.offsets[piece.name]
    item_bytes = DTYPES[spec.dtype].itemsize
    pitch_bytes = math.prod(spec.shape[1:]) * item_bytes
    if piece.dim == 0:
        return Part(number, piece, 0, piece.length, pitch_bytes, 0, start + piece.source * pitch_bytes, pitch_bytes)
    row_bytes = piece.length * math.prod(spec.shape[2:]) * item_bytes
    return Part(number, piece, 0, shard.map.shape[0], row_bytes, 0, start + piece.source * item_bytes, pitch_bytes)


PORTION_BYTES = 1 << 24
"""The bytes that are sent again after a connection broke; a larger number costs less work for each byte."""


def list_portions(
    shards: Sequence[Shard], plan: FilePlan, writer: int, most_bytes: int = PORTION_BYTES
) -> list[Portion]:
    """Divide what a rank owns, which must be the writer of this number."""
    files = {file: number for number, file in enumerate(plan.sizes)}
    tensors = {name: number for number, name in enumerate(sorted(plan.specs))}
    return [
        Portion(files[parcel.file], writer, tuple(parcel.list_strips()), tuple(_count(parcel, plan, tensors)))
        for parcel in plan_parcels(shards, plan, most_bytes)
    ]


def describe_contents(plan: FilePlan, num_writers: int, portions: Sequence[Portion]) -> Contents:
    """Describe a version whose portions these are, those of all writers."""
    files = tuple(File(name, size, plan.headers[name]) for name, size in plan.sizes.items())
    return Contents(files, tuple(sorted(plan.specs)), num_writers, tuple(portions))


def _count(parcel: Parcel, plan: FilePlan, tensors: dict[str, int]) -> list[tuple[int, int]]:
    return [
        (tensors[name], num_bytes // DTYPES[plan.specs[name].dtype].itemsize)
        for name, num_bytes in parcel.count_bytes().items()
    ]
