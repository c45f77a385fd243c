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

Letters: R rows and C columns of a parameter, or of a tensor, seen as a matrix.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator

import torch

from megatron_rl.ops.slices import Move
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.derived import list_derived
from megatron_rl.sidecar.vllm.held import Order, Rectangle, as_matrix

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
    return [_describe(names, what) for names, what in found if names]


def find_misfits(model: torch.nn.Module, order: Order, specs: Iterable[TensorSpec]) -> list[str]:
    """Return why these tensors must be loaded by vLLM: a copy in place could not be proved, or would be incomplete."""
    given = {spec.name: DTYPES[spec.dtype] for spec in specs}
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    absent = {tensor for rows in order.rows.values() for tensor in rows.tensors} - given.keys()
    rounded = [
        name
        for name, rows in order.rows.items()
        if any(
            torch.promote_types(given.get(tensor, dtypes[name]), dtypes[name]) != dtypes[name]
            for tensor in rows.tensors
        )
    ]
    found = ((absent, "tensors did not come"), (rounded, "parameters are narrower than their tensors"))
    return [_describe(names, what) for names, what in found if names]


def _describe(names: Collection[str], what: str) -> str:
    return f"{len(names)} {what}: {', '.join(sorted(names)[:_NAMED])}"


@dataclasses.dataclass(frozen=True)
class _Part:
    """A rectangle of a tensor, and the rows of a parameter that hold it."""

    rectangle: Rectangle
    held_RC: torch.Tensor


class Places:
    """The places of tensors in a model's parameters, to copy them to."""

    def __init__(self, model: torch.nn.Module, order: Order) -> None:
        self._parts: dict[str, list[_Part]] = {}
        parameters = dict(model.named_parameters())
        for name, rows in order.rows.items():
            # A view: `find_obstacles` refuses parameters that are not one piece.
            held_RC = as_matrix(name, parameters[name])
            for tensor, part, place in zip(rows.tensors, rows.rectangles, rows.places, strict=True):
                self._parts.setdefault(tensor, []).append(_Part(part, held_RC[place]))
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


def _copy(part: _Part, tensor_RC: torch.Tensor) -> None:
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
