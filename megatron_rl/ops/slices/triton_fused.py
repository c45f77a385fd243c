"""The operations over slices as Triton kernels: a launch for each kind of slice, whatever the number of slices."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_rl.ops import triton_support
from megatron_rl.ops.slices import naive
from megatron_rl.ops.slices.triton_tables import Launch, SliceKind, build_launches

if TYPE_CHECKING:
    from megatron_rl.ops.slices import Move, Placed, Slice


class KernelDigester:
    """Digests all slices of a kind in one launch."""

    def __init__(self, slices: "Sequence[Slice]", dtype: torch.dtype, num_tensors: int):
        # The tables hold addresses: the slices must not be freed.
        self._slices = slices
        self._device = slices[0].values_RC.device if slices else torch.device("cpu")
        self._num_tensors = num_tensors
        self._launches = build_launches(_to_digest(one, dtype) for one in slices)
        num_words = max((_count_words(one) for one in self._launches), default=1)
        num_rows = max((one.end_row for one in self._launches), default=1)
        self._factors = [
            naive.get_factors(axis, count, self._device)
            for axis, count in ((naive.COLUMNS, num_words), *((axis, num_rows) for axis in naive.ROWS))
        ]

    def digest(self) -> torch.Tensor:
        """Sum the digests of each tensor's slices, in the dtype of their export: int64, (tensors, lanes)."""
        from megatron_rl.ops.slices.triton_kernels import digest_kernel

        sums = torch.zeros(self._num_tensors, naive.NUM_LANES, dtype=torch.int64, device=self._device)
        for one in self._launches:
            launch(digest_kernel, one, [*self._factors, sums])
        return sums


class KernelPacker:
    """Packs all slices of a kind in one launch."""

    def __init__(self, batches: "Sequence[Sequence[Placed]]", dtype: torch.dtype):
        # The tables hold addresses: the slices must not be freed.
        self._slices = batches
        self._batches = [build_launches(_to_pack(placed, dtype) for placed in batch) for batch in batches]

    def pack(self, batch: int, buffer: torch.Tensor) -> None:
        """Copy the slices of a batch into a buffer of bytes on their device, in the dtype of their export."""
        from megatron_rl.ops.slices.triton_kernels import copy_kernel

        for one in self._batches[batch]:
            item_bytes = one.kind.target.itemsize
            elements = buffer[: buffer.numel() // item_bytes * item_bytes].view(naive.BITS[item_bytes])
            launch(copy_kernel, one, [elements])


class KernelMover:
    """Moves all slices of a kind in one launch."""

    def __init__(self, moves: "Sequence[Move]"):
        # The tables hold addresses: the slices and their places must not be freed.
        self._moves = moves
        self._launches = build_launches(_to_move(move) for move in moves)

    def move(self) -> None:
        """Copy every slice to its place, in the place's dtype."""
        from megatron_rl.ops.slices.triton_kernels import copy_kernel

        for one in self._launches:
            launch(copy_kernel, one, [None])


def launch(kernel: Any, one: Launch, tensors: Sequence[torch.Tensor | None]) -> None:
    """Launch a program for each task."""
    constants = name_constants(one.kind, one.rows_per_task)
    grid = (len(one.tasks),)
    triton_support.launch(kernel, grid, one.slices, one.tasks, *tensors, one.kind.column_stride, **constants)


def name_constants(kind: SliceKind, rows_per_task: int) -> dict[str, Any]:
    """Name the constants that a kernel is compiled with."""
    import triton.language as tl

    def name(dtype: torch.dtype) -> Any:
        return getattr(tl, str(dtype).removeprefix("torch."))

    rows, columns = kind.tile
    item_bytes = kind.target.itemsize
    return {
        "SOURCE": name(kind.source),
        "TARGET": name(kind.target),
        "BITS": name(naive.BITS[item_bytes]),
        "NUM_BITS": 8 * item_bytes,
        "ROWS_PER_TASK": rows_per_task,
        "ROWS": rows,
        "COLUMNS": columns,
    }


def _to_digest(one: "Slice", dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype, Sequence[int]]:
    values_RC, tensor, first_row, first_column = one
    values_RC = values_RC.detach()
    if values_RC.dtype == dtype and naive.is_of_words(values_RC, first_column):
        first_column //= naive.WORD_BYTES // dtype.itemsize
        return values_RC.view(torch.int64), torch.int64, (first_row, first_column, tensor)
    return values_RC, dtype, (first_row, first_column, tensor)


def _to_pack(placed: "Placed", dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype, Sequence[int]]:
    values_RC, first_byte = placed
    values_RC = values_RC.detach()
    if values_RC.dtype == dtype and naive.is_of_words(values_RC) and first_byte % naive.WORD_BYTES == 0:
        return values_RC.view(torch.int64), torch.int64, (first_byte // naive.WORD_BYTES,)
    return values_RC, dtype, (first_byte // dtype.itemsize,)


def _to_move(move: "Move") -> tuple[torch.Tensor, torch.dtype, Sequence[int]]:
    values_RC, place_RC = (slice_RC.detach() for slice_RC in move)
    if values_RC.dtype == place_RC.dtype and naive.is_of_words(values_RC) and naive.is_of_words(place_RC):
        values_RC, place_RC = values_RC.view(torch.int64), place_RC.view(torch.int64)
    return values_RC, place_RC.dtype, (place_RC.data_ptr(), place_RC.stride(0))


def _count_words(launch: Launch) -> int:
    """Return a number above those of all words of a launch's slices."""
    return -(-launch.end_column * launch.kind.target.itemsize // naive.WORD_BYTES)
