"""Weights in the memory of the trainer's devices, opened in a worker: the pieces that an offer names.

Opening memory takes longer than copying it, and so does planning the copies. So what is opened is kept for as long as
offers name it, and copies are planned again only if an offer or a parameter lies elsewhere than before.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import torch

from megatron_rl.errors import InputError
from megatron_rl.ops.slices import SliceMover, build_slice_mover
from megatron_rl.platforms.device_sharing import CannotShare, DeviceSharing, MemoryHandle
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import Offer, OfferedPiece, identify_host
from megatron_rl.sidecar.vllm.held import Order, Rectangle
from megatron_rl.sidecar.vllm.in_place import Places

_NAMED = 5
_Key = tuple[str, int, int, MemoryHandle]
"""A run, the number of a rank in it, the generation of the rank's memory, and a handle."""


@dataclasses.dataclass(frozen=True)
class OpenedPiece:
    """A rectangle of a tensor, as a view of the trainer's memory."""

    place: Rectangle
    values_RC: torch.Tensor


@dataclasses.dataclass(frozen=True)
class OpenedOffer:
    """The tensors of an offer, each with the pieces that cover it."""

    specs: tuple[TensorSpec, ...]
    pieces: Mapping[str, Sequence[OpenedPiece]]


class OpenedMemory:
    """Opens offers and copies from them; keeps the memory that the last one named, and the plan of its copies."""

    def __init__(self, sharing: DeviceSharing) -> None:
        self._sharing = sharing
        self._kept: dict[_Key, torch.Tensor] = {}
        self._last: tuple[Offer, OpenedOffer] | None = None
        # The offer and the addresses that the mover was built for.
        self._copied: OpenedOffer | None = None
        self._addresses: list[int] = []
        self._mover: SliceMover | None = None

    def open(self, offer: Offer) -> OpenedOffer:
        """Open what an offer names; raise CannotShare if this process cannot, InputError if its pieces are wrong."""
        if offer.host != identify_host():
            raise CannotShare("the trainer runs on another host, or in another namespace of processes or of memory")
        if _drop_build(offer.torch) != _drop_build(torch.__version__):
            raise CannotShare(
                f"the trainer's torch is {offer.torch} and the engine's is {torch.__version__}, and each release makes "
                "handles of its own"
            )
        unnamed = msgspec.structs.replace(offer, fingerprint="")
        if self._last is not None and self._last[0] == unnamed:
            return self._last[1]
        keys = [(offer.run, number, rank.generation) for number, rank in enumerate(offer.ranks)]
        memories = [
            [self._open((*key, handle)) for handle in rank.handles] for key, rank in zip(keys, offer.ranks, strict=True)
        ]
        named = {(*key, handle) for key, rank in zip(keys, offer.ranks, strict=True) for handle in rank.handles}
        self._kept = {key: memory for key, memory in self._kept.items() if key in named}
        others = offer.other_dtypes
        specs = tuple(TensorSpec(name, shape, others.get(name, offer.dtype)) for name, shape in offer.tensors)
        pieces: dict[str, list[OpenedPiece]] = {spec.name: [] for spec in specs}
        for rank, memory in zip(offer.ranks, memories, strict=True):
            for piece in rank.pieces:
                place = Rectangle(piece.first_row, piece.first_column, piece.num_rows, piece.num_columns)
                spec = specs[piece.tensor]
                values_RC = _view(memory[piece.memory].view(DTYPES[spec.dtype]), piece)
                pieces[spec.name].append(OpenedPiece(place, values_RC))
        _must_cover(specs, pieces)
        opened = OpenedOffer(specs, pieces)
        self._last = unnamed, opened
        return opened

    def copy(self, opened: OpenedOffer, places: Places) -> None:
        """Queue the copies of all pieces, with one launch for each kind of slice."""
        addresses = places.list_addresses()
        if self._mover is None or self._copied is not opened or self._addresses != addresses:
            moves = [
                move
                for name, pieces in opened.pieces.items()
                for piece in pieces
                for move in places.list_moves(name, piece.place, piece.values_RC)
            ]
            self._copied, self._addresses, self._mover = opened, addresses, build_slice_mover(moves)
        self._mover.move()

    def _open(self, key: _Key) -> torch.Tensor:
        if key not in self._kept:
            self._kept[key] = self._sharing.open(key[-1])
        return self._kept[key]


def _drop_build(version: str) -> str:
    return version.partition("+")[0]


def find_unheld(order: Order, specs: Sequence[TensorSpec], tied: str) -> list[str]:
    """Return why a worker must read files: it would have to digest tensors that it does not hold."""
    held = {tensor for rows in order.rows.values() for tensor in rows.tensors}
    unheld = sorted({spec.name for spec in specs} - held - {tied})
    if not unheld:
        return []
    return [f"{len(unheld)} tensors are held by other workers: {', '.join(unheld[:_NAMED])}"]


def _view(memory: torch.Tensor, piece: OfferedPiece) -> torch.Tensor:
    last = piece.first_element + (piece.num_rows - 1) * piece.pitch + piece.num_columns
    if min(piece.first_element, piece.pitch) < 0 or min(piece.num_rows, piece.num_columns) < 1 or last > len(memory):
        raise InputError(f"a piece of tensor {piece.tensor} does not lie in the memory that is offered: {piece}")
    return memory.as_strided((piece.num_rows, piece.num_columns), (piece.pitch, 1), piece.first_element)


def _must_cover(specs: Sequence[TensorSpec], pieces: Mapping[str, Sequence[OpenedPiece]]) -> None:
    """Raise unless pieces have as many elements as their tensors; that these are the right ones is proved later."""
    counts = {name: sum(piece.values_RC.numel() for piece in of_tensor) for name, of_tensor in pieces.items()}
    if wrong := sorted(spec.name for spec in specs if counts[spec.name] != spec.num_elements):
        raise InputError(f"the pieces that are offered do not cover {len(wrong)} tensors: {', '.join(wrong[:_NAMED])}")
