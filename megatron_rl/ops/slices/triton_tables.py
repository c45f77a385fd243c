"""The tables from which the programs of a kernel learn which part of which slice is theirs.

A launch has a table of slices, with a line for each, and a table of tasks, with a line for each program: its slice, and
the row of that slice at which it begins. Slices that a launch cannot process together differ in kind. A model
has few kinds, however many layers it has.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

_TASK_ELEMENTS = 1 << 14
"""Elements of a task, which occupy a program long enough that reading the tables takes no time beside it."""
_NARROW = 16
"""The number of columns from which on a program's threads are spread over the columns of a row."""


@dataclasses.dataclass(frozen=True)
class SliceKind:
    """The properties that all slices of a launch share."""

    source: torch.dtype
    """The dtype of what is read; int64 for whole words."""
    target: torch.dtype
    column_stride: int
    is_narrow: bool

    @property
    def tile(self) -> tuple[int, int]:
        """The rows and columns that a program reads at once."""
        return (256, 8) if self.is_narrow else (8, 256)


class Line:
    """The columns of a table of slices."""

    POINTER, ROW_STRIDE, NUM_ROWS, NUM_COLUMNS, FIRST, SECOND, TENSOR = range(7)
    WIDTH = 8


@dataclasses.dataclass(frozen=True)
class Launch:
    kind: SliceKind
    slices: torch.Tensor
    """int64, (slices, Line.WIDTH)."""
    tasks: torch.Tensor
    """int32, (programs, 2)."""
    rows_per_task: int
    end_row: int
    """The most of FIRST and NUM_ROWS together."""
    end_column: int
    """The most of SECOND and NUM_COLUMNS together."""


def build_launches(slices: Iterable[tuple[torch.Tensor, torch.dtype, Sequence[int]]]) -> list[Launch]:
    """Build the tables for slices, each with the dtype to convert it to and the numbers for the columns from FIRST."""
    by_kind: dict[SliceKind, list[list[int]]] = {}
    device = torch.device("cpu")
    for values_RC, target, numbers in slices:
        num_rows, num_columns = values_RC.shape
        if not values_RC.numel():
            continue
        device = values_RC.device
        column_stride = values_RC.stride(1) if num_columns > 1 else 1
        kind = SliceKind(values_RC.dtype, target, column_stride, num_columns < _NARROW)
        line = [values_RC.data_ptr(), values_RC.stride(0), num_rows, num_columns, *numbers]
        by_kind.setdefault(kind, []).append(line + [0] * (Line.WIDTH - len(line)))
    return [_build_launch(kind, lines, device) for kind, lines in by_kind.items()]


def _build_launch(kind: SliceKind, lines: list[list[int]], device: torch.device) -> Launch:
    widest = max(line[Line.NUM_COLUMNS] for line in lines)
    tile_rows = kind.tile[0]
    rows_per_task = max(1, _TASK_ELEMENTS // widest // tile_rows) * tile_rows
    slices = torch.tensor(lines, dtype=torch.int64)
    counts = torch.tensor([math.ceil(line[Line.NUM_ROWS] / rows_per_task) for line in lines])
    owners = torch.arange(len(lines)).repeat_interleave(counts)
    firsts = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    tasks = torch.stack([owners, firsts * rows_per_task], dim=1).to(torch.int32)
    end_row = max(line[Line.FIRST] + line[Line.NUM_ROWS] for line in lines)
    end_column = max(line[Line.SECOND] + line[Line.NUM_COLUMNS] for line in lines)
    return Launch(kind, slices.to(device), tasks.to(device), rows_per_task, end_row, end_column)
