"""Operations over many slices of tensors in one pass: their digests, and their copies to one buffer or to many places.

A `Digester`, a `SlicePacker` or a `SliceMover` is built once for slices that stay where they are, and then runs as
often as their numbers change. With Triton each takes one launch for all slices of a kind, however many they are
(`triton_tables.SliceKind`). Without it the naive twins compute the same bits slice by slice.

Letters: R rows, C columns of a slice seen as a matrix.
"""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from megatron_rl.ops.slices import naive

__all__ = [
    "Digester",
    "Move",
    "Placed",
    "Slice",
    "SliceMover",
    "SlicePacker",
    "build_digester",
    "build_slice_mover",
    "build_slice_packer",
    "list_reasons_against_kernels",
]

_KERNELS = "megatron_rl.ops.slices.triton_fused"
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes between which kernels convert. A slice that keeps its dtype may have any."""


class Slice(NamedTuple):
    values_RC: torch.Tensor
    tensor: int
    """The number of the tensor among those that are digested."""
    first_row: int = 0
    first_column: int = 0


class Placed(NamedTuple):
    """A slice, and its place in a buffer, where its rows lie one after the other without gaps."""

    values_RC: torch.Tensor
    first_byte: int


class Move(NamedTuple):
    """A slice, and the slice of the same shape and device that it is copied to."""

    values_RC: torch.Tensor
    place_RC: torch.Tensor


class Digester(Protocol):
    """Digests of fixed slices."""

    def digest(self) -> torch.Tensor:
        """Sum the digests of each tensor's slices, in the dtype of their export: int64, (tensors, lanes)."""
        ...


class SlicePacker(Protocol):
    """Copies of fixed slices, in fixed batches."""

    def pack(self, batch: int, buffer: torch.Tensor) -> None:
        """Copy the slices of a batch into a buffer of bytes on their device, in the dtype of their export."""
        ...


class SliceMover(Protocol):
    """Copies of fixed slices to fixed places."""

    def move(self) -> None:
        """Copy every slice to its place, in the place's dtype."""
        ...


def build_digester(slices: Sequence[Slice], dtype: torch.dtype, num_tensors: int) -> Digester:
    """Build the fastest digester that the slices' device has."""
    if list_reasons_against_kernels(slices, dtype):
        return naive.NaiveDigester(slices, dtype, num_tensors)
    digester: Digester = importlib.import_module(_KERNELS).KernelDigester(slices, dtype, num_tensors)
    return digester


def build_slice_packer(batches: Sequence[Sequence[Placed]], dtype: torch.dtype) -> SlicePacker:
    """Build the fastest packer that the slices' device has."""
    if list_reasons_against_kernels([placed for batch in batches for placed in batch], dtype):
        return naive.NaivePacker(batches, dtype)
    packer: SlicePacker = importlib.import_module(_KERNELS).KernelPacker(batches, dtype)
    return packer


def build_slice_mover(moves: Sequence[Move]) -> SliceMover:
    """Build the fastest mover that the slices' device has."""
    by_dtype: dict[torch.dtype, list[Move]] = {}
    for move in moves:
        by_dtype.setdefault(move.place_RC.dtype, []).append(move)
    is_in_pieces = any(move.place_RC.shape[1] > 1 and move.place_RC.stride(1) != 1 for move in moves)
    if is_in_pieces or any(list_reasons_against_kernels(some, dtype) for dtype, some in by_dtype.items()):
        return naive.NaiveMover(moves)
    mover: SliceMover = importlib.import_module(_KERNELS).KernelMover(moves)
    return mover


def list_reasons_against_kernels(slices: Sequence[Slice | Placed | Move], dtype: torch.dtype) -> list[str]:
    """Return why kernels cannot convert these slices to the dtype; an empty list if they can."""
    reasons = []
    kinds = {one.values_RC.device.type for one in slices}
    if others := sorted(kinds - {"cuda", "cpu"}):
        reasons.append(f"they are not known to work on {', '.join(others)}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed")
    elif "cpu" in kinds and os.environ.get("TRITON_INTERPRET") != "1":
        reasons.append("on the CPU they need Triton's interpreter, TRITON_INTERPRET=1")
    converted = {one.values_RC.dtype for one in slices} - {dtype}
    if unknown := sorted(str(one) for one in (converted | {dtype} if converted else set()) - {*ROUNDED}):
        reasons.append(f"they do not convert {', '.join(unknown)}")
    return reasons
