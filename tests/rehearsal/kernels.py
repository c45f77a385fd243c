"""Launches over slices on the emulated device: stand-ins do what the tables say, at the addresses in the tables.

`tests/kernels/interpreted_slices.py` has Triton's interpreter run the kernels themselves, which takes seconds a layer.
"""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megatron_rl.ops import slices
from megatron_rl.ops.slices import naive, triton_fused
from megatron_rl.ops.slices.triton_tables import Launch, Line, SliceKind
from megatron_rl.shared.weights import device_export
from tests.rehearsal import device
from tests.rehearsal.streams import locate, state


@contextlib.contextmanager
def kernels_run() -> Iterator[list[str]]:
    """Have kernels launched in this context, and list what they do; a launch with tensors writes the last one alone."""
    launched: list[str] = []

    def launch(kernel: Any, one: Launch, tensors: Sequence[torch.Tensor | None]) -> None:
        written_to = tensors[-1]
        name = "move" if written_to is None else "pack" if kernel.fn.__name__ == "copy_kernel" else "digest"
        given = [tensor for tensor in (one.slices, one.tasks, *tensors) if tensor is not None]
        read = [tensor.block for tensor in given]  # type: ignore[attr-defined]
        written = [] if written_to is None else [read.pop()]
        state.operate(name, locate(), list(dict.fromkeys(read)), written)
        launched.append(name)
        # What a kernel computes is the device's work, whatever is counted on the host.
        with _disable_current_modes():
            for line in device.bytes_of(one.slices).tolist():
                _STAND_INS[name](one.kind, line, None if written_to is None else device.bytes_of(written_to))

    with (
        mock.patch.object(triton_fused, "launch", launch),
        mock.patch.object(slices, "list_reasons_against_kernels", return_value=[]),
        mock.patch.object(device_export, "list_reasons_against_kernels", return_value=[]),
    ):
        yield launched


def _read(kind: SliceKind, line: list[int]) -> torch.Tensor:
    """View the memory that a line of a table points to."""
    num_rows, num_columns, row_stride = line[Line.NUM_ROWS], line[Line.NUM_COLUMNS], line[Line.ROW_STRIDE]
    count = (num_rows - 1) * row_stride + (num_columns - 1) * kind.column_stride + 1
    memory = (ctypes.c_char * (count * kind.source.itemsize)).from_address(line[Line.POINTER])
    strides = (row_stride, kind.column_stride)
    return torch.frombuffer(memory, dtype=kind.source).as_strided((num_rows, num_columns), strides).to(kind.target)


def _digest(kind: SliceKind, line: list[int], sums: torch.Tensor) -> None:
    sums[line[Line.TENSOR]] += naive.digest(_read(kind, line), line[Line.FIRST], line[Line.SECOND])


def _pack(kind: SliceKind, line: list[int], elements: torch.Tensor) -> None:
    values = _read(kind, line).reshape(-1)
    elements[line[Line.FIRST] :][: len(values)] = values.view(elements.dtype)


def _move(kind: SliceKind, line: list[int], _: None) -> None:
    values_RC, stride = _read(kind, line), line[Line.SECOND]
    count = (len(values_RC) - 1) * stride + values_RC.shape[1]
    memory = (ctypes.c_char * (count * kind.target.itemsize)).from_address(line[Line.FIRST])
    torch.frombuffer(memory, dtype=kind.target).as_strided(values_RC.shape, (stride, 1)).copy_(values_RC)


_STAND_INS = {"digest": _digest, "pack": _pack, "move": _move}
