"""Weights copied to where a learned order says that they lie, in the memory that the model computes with.

vLLM's own reload loads every tensor twice, converts it on the host, and copies the result to where the old one was.
Here each part of a tensor is copied once, from the trainer's files or its devices' memory into its rows of a parameter.
The host reads no number, and no parameter moves, so CUDA graphs stay valid.

This is right for a model whose parameters all hold given numbers as they are, if nothing else follows from them.
`find_obstacles` names the parameters that forbid it. A layer that keeps a changed copy elsewhere is found when the
engine starts (`VllmEngine.start`): the log-probs of its probe would be those of other weights.

Copies are queued on the current stream. Invariants:

- a copy between host and device has the same bytes on both sides, one piece on each: torch would gather or convert
  anything else on the host, in one thread;
- what must be gathered or converted is first copied as it is, a chunk of rows at a time, and then moved on the device;
- the host waits once, at the end (`Places.wait`).

From the trainer's devices a worker copies the pieces that an offer names. Opening memory takes longer than copying it,
and so does planning the copies. So what is opened is kept for as long as offers name it, and copies are planned again
only if an offer or a parameter lies elsewhere than before.

Letters: R rows and C columns of a parameter, or of a tensor, seen as a matrix.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import torch

from megatron_rl.errors import InputError
from megatron_rl.ops.slices import Move, SliceMover, build_slice_mover
from megatron_rl.platforms.platform import CannotShare, DeviceSharing, MemoryHandle
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import Offer, OfferedPiece, identify_host
from megatron_rl.sidecar.vllm.derived import list_derived
from megatron_rl.sidecar.vllm.held import TIED, Order, Rectangle, as_matrix

# Each piece is a copy of its own: beyond this number vLLM's reload may be faster.
_MAX_PIECES = 4096
_CHUNK_BYTES = 1 << 26
_NAMED = 5


def find_obstacles(model: torch.nn.Module, order: Order, unheld: Collection[str] = ()) -> list[str]:
    """Return why weights of this model must be loaded by vLLM, with the names of parameters; nothing if they need not.

    `unheld` has the tensors that no parameter holds, if all parameters are here.
    """
    parameters = dict(model.named_parameters())
    held = [name for name in order.rows if name in parameters and name not in order.packed]
    scattered = [name for name in held if not parameters[name].is_contiguous()]
    divided = [name for name in held if len(order.rows[name].rectangles) > _MAX_PIECES]
    found = (
        (order.packed, "parameters are packed by their layers"),
        (order.unknown, "parameters do not hold a tensor's numbers as they are"),
        (list_derived(model), "parameters follow from others at the end of a load"),
        (scattered, "parameters are not one piece of memory"),
        (divided, f"parameters hold more than {_MAX_PIECES} parts of tensors"),
        (unheld, "tensors are held by no parameter"),
    )
    return describe(found)


def find_misfits(model: torch.nn.Module, order: Order, specs: Iterable[TensorSpec]) -> list[str]:
    """Return why these tensors must be loaded by vLLM: a copy in place could not be proved, or would be incomplete."""
    given = {spec.name: DTYPES[spec.dtype] for spec in specs}
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    absent = _list_held(order) - given.keys()
    rounded = [
        name
        for name, rows in order.rows.items()
        if any(
            torch.promote_types(given.get(tensor, dtypes[name]), dtypes[name]) != dtypes[name]
            for tensor in rows.tensors
        )
    ]
    return describe(((absent, "tensors did not come"), (rounded, "parameters are narrower than their tensors")))


def find_unheld(order: Order, specs: Iterable[TensorSpec]) -> set[str]:
    """Return the tensors that a worker does not hold: others may."""
    return {spec.name for spec in specs} - _list_held(order) - {TIED}


def _list_held(order: Order) -> set[str]:
    return {tensor for rows in order.rows.values() for tensor in rows.tensors}


def describe(found: Iterable[tuple[Collection[str], str]]) -> list[str]:
    """Name the first of some tensors or parameters, each list with what they are."""
    return [f"{len(names)} {what}: {', '.join(sorted(names)[:_NAMED])}" for names, what in found if names]


@dataclasses.dataclass(frozen=True)
class HeldPiece:
    """A rectangle of a tensor, and the memory that holds it: rows of a parameter, or the trainer's."""

    rectangle: Rectangle
    held_RC: torch.Tensor


class Places:
    """The places of tensors in a model's parameters, to copy them to."""

    def __init__(self, model: torch.nn.Module, order: Order) -> None:
        self._parts: dict[str, list[HeldPiece]] = {}
        parameters = dict(model.named_parameters())
        for name, rows in order.rows.items():
            # A view: `find_obstacles` refuses parameters that are not one piece.
            held_RC = as_matrix(name, parameters[name])
            for tensor, part, place in zip(rows.tensors, rows.rectangles, rows.places, strict=True):
                self._parts.setdefault(tensor, []).append(HeldPiece(part, held_RC[place]))
        self._device = next(iter(parameters.values())).device

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Queue the copies of a tensor, whose memory must not change before `wait` returns."""
        tensor_RC = tensor.reshape(tensor.shape[0], -1)
        for part in self._parts.get(name, ()):
            _copy(part, tensor_RC)

    def list_moves(self, name: str, place: Rectangle, piece_RC: torch.Tensor) -> Iterator[Move]:
        """Yield the copies of a rectangle of a tensor, which lies on the device, to wherever parts of it are held."""
        for part in self._parts.get(name, ()):
            common = _intersect(part.rectangle, place)
            if common is not None:
                yield Move(_cut(piece_RC, place, common), _cut(part.held_RC, part.rectangle, common))

    def list_addresses(self) -> list[int]:
        """List where parts of tensors are held."""
        return [part.held_RC.data_ptr() for parts in self._parts.values() for part in parts]

    def wait(self) -> None:
        """Wait until all copies are done."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).current_stream().synchronize()


def _intersect(one: Rectangle, other: Rectangle) -> Rectangle | None:
    first_row, first_column = max(one.first_row, other.first_row), max(one.first_column, other.first_column)
    num_rows = min(one.first_row + one.num_rows, other.first_row + other.num_rows) - first_row
    num_columns = min(one.first_column + one.num_columns, other.first_column + other.num_columns) - first_column
    return Rectangle(first_row, first_column, num_rows, num_columns) if min(num_rows, num_columns) > 0 else None


def _cut(matrix_RC: torch.Tensor, place: Rectangle, part: Rectangle) -> torch.Tensor:
    """Return a part of the matrix that lies at a place."""
    row, column = part.first_row - place.first_row, part.first_column - place.first_column
    return matrix_RC[row : row + part.num_rows, column : column + part.num_columns]


def _copy(part: HeldPiece, tensor_RC: torch.Tensor) -> None:
    (first_row, first_column, num_rows, num_columns), held_RC = part.rectangle, part.held_RC
    given_RC = tensor_RC[first_row : first_row + num_rows]
    columns = slice(first_column, first_column + num_columns)
    if tensor_RC.device == held_RC.device:
        held_RC.copy_(given_RC[:, columns])
    elif tensor_RC.dtype == held_RC.dtype and num_columns == tensor_RC.shape[1] and held_RC.is_contiguous():
        held_RC.copy_(given_RC, non_blocking=True)
    else:
        step = max(1, _CHUNK_BYTES // (tensor_RC.shape[1] * tensor_RC.element_size()))
        for held_chunk_RC, given_chunk_RC in zip(held_RC.split(step), given_RC.split(step), strict=True):
            held_chunk_RC.copy_(given_chunk_RC.to(held_RC.device, non_blocking=True)[:, columns])


_Key = tuple[str, int, int, MemoryHandle]
"""A run, the number of a rank in it, the generation of the rank's memory, and a handle."""


@dataclasses.dataclass(frozen=True)
class OpenedOffer:
    """The tensors of an offer, each with the pieces that cover it."""

    specs: tuple[TensorSpec, ...]
    pieces: Mapping[str, Sequence[HeldPiece]]


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
        pieces: dict[str, list[HeldPiece]] = {spec.name: [] for spec in specs}
        for rank, memory in zip(offer.ranks, memories, strict=True):
            for piece in rank.pieces:
                place = Rectangle(piece.first_row, piece.first_column, piece.num_rows, piece.num_columns)
                spec = specs[piece.tensor]
                held_RC = _view(memory[piece.memory].view(DTYPES[spec.dtype]), piece)
                pieces[spec.name].append(HeldPiece(place, held_RC))
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
                for move in places.list_moves(name, piece.rectangle, piece.held_RC)
            ]
            self._copied, self._addresses, self._mover = opened, addresses, build_slice_mover(moves)
        self._mover.move()

    def _open(self, key: _Key) -> torch.Tensor:
        if key not in self._kept:
            self._kept[key] = self._sharing.open(key[-1])
        return self._kept[key]


def _drop_build(version: str) -> str:
    return version.partition("+")[0]


def _view(memory: torch.Tensor, piece: OfferedPiece) -> torch.Tensor:
    last = piece.first_element + (piece.num_rows - 1) * piece.pitch + piece.num_columns
    if min(piece.first_element, piece.pitch) < 0 or min(piece.num_rows, piece.num_columns) < 1 or last > len(memory):
        raise InputError(f"a piece of tensor {piece.tensor} does not lie in the memory that is offered: {piece}")
    return memory.as_strided((piece.num_rows, piece.num_columns), (piece.pitch, 1), piece.first_element)


def _must_cover(specs: Sequence[TensorSpec], pieces: Mapping[str, Sequence[HeldPiece]]) -> None:
    """Raise unless pieces have as many elements as their tensors; that these are the right ones is proved later."""
    counts = {name: sum(piece.held_RC.numel() for piece in of_tensor) for name, of_tensor in pieces.items()}
    if wrong := sorted(spec.name for spec in specs if counts[spec.name] != spec.num_elements):
        raise InputError(f"the pieces that are offered do not cover {len(wrong)} tensors: {', '.join(wrong[:_NAMED])}")
