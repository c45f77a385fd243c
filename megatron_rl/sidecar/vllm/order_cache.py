"""Keeps the learned order of a model's weights on disk, so that another start need not learn it.

Learning loads the model five times or more. A cached order is proved by one load of random numbers, which is the last
step of learning too. So the file need not be trusted:

- an order is used only if every parameter of the model holds the random numbers that it names for it;
- an order that leaves any parameter out is neither kept nor used: it is learned at each start.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.records.append_file import make_private_folder, write_private
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.held import Order, ParameterRows, Rectangle, as_matrix
from megatron_rl.sidecar.vllm.learned_order import Find, Load, learn_order, prove_order

_log = logging.getLogger(__name__)


class _CachedRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tensors: tuple[str, ...]
    rectangles: tuple[Rectangle, ...]
    starts: tuple[int, ...]
    first_column: int
    num_rows: int
    steps: tuple[int, ...] = ()


class _CachedOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: dict[str, _CachedRows]
    packed: frozenset[str]
    handed_over: frozenset[str]


def recall_or_learn(
    model: torch.nn.Module, specs: Sequence[TensorSpec], dtype: torch.dtype, load: Load, facts: Mapping[str, Any]
) -> Order:
    """Return the model's order: the kept one if it is proved, or else learn it, and keep it if it is complete.

    `facts` is everything beyond names and shapes that decides the order. The model holds no real weights afterwards.
    """
    path = _find_path(model, specs, {**facts, "dtype": str(dtype)})
    kept = None if path is None else _read(path)
    if kept is not None:
        order = prove_order(model, specs, dtype, load, _find_in(kept, specs))
        if _is_proved(order, kept):
            return order
        _log.warning("the order of weights in %s is not that of this model: it is learned again", path)
    order = learn_order(model, specs, dtype, load)
    if path is not None and not order.unknown:
        _write(path, order)
    return order


def _find_path(model: torch.nn.Module, specs: Sequence[TensorSpec], facts: Mapping[str, Any]) -> Path | None:
    """Return the file for an order of this model; None if this user has no folder for caches."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_rl" / "orders"
    except RuntimeError as error:
        _log.warning("the order of weights is not kept: %s", error)
        return None
    key = {
        **facts,
        "model": type(model).__qualname__,
        "parameters": [(name, *parameter.shape, str(parameter.dtype)) for name, parameter in model.named_parameters()],
        "tensors": [(spec.name, *spec.shape, spec.dtype) for spec in specs],
    }
    return folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> _CachedOrder | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_CachedOrder)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("the order of weights in %s cannot be read and is learned again: %s", path, error)
        return None


def _write(path: Path, order: Order) -> None:
    rows = {
        name: _CachedRows(one.tensors, one.rectangles, one.starts, one.first_column, len(one.rows_R), one.steps)
        for name, one in order.rows.items()
    }
    # Engines that start together write the same file.
    own = path.with_suffix(f".{os.getpid()}")
    try:
        make_private_folder(path.parent)
        write_private(own, msgspec.json.encode(_CachedOrder(rows, order.packed, order.handed_over)))
        own.replace(path)
    except (OSError, MegatronRLError) as error:
        _log.warning("the order of weights is not kept: %s", error)


def _find_in(kept: _CachedOrder, specs: Sequence[TensorSpec]) -> Find:
    shapes = {spec.name: (spec.shape[0], spec.num_elements // spec.shape[0]) for spec in specs}

    def find(name: str, parameter: torch.Tensor, is_in_place: bool) -> ParameterRows | None:
        rows = kept.rows.get(name)
        if rows is None or is_in_place == (name in kept.packed) or not _fits(name, rows, parameter, shapes):
            return None
        rows_R = torch.zeros(rows.num_rows, dtype=torch.int64)
        slices_R = torch.full_like(rows_R, len(rows.tensors))
        found = ParameterRows(
            rows.tensors, rows.rectangles, rows.starts, rows.first_column, rows_R, slices_R, rows.steps
        )
        for index, (place, part) in enumerate(zip(found.places, rows.rectangles, strict=True)):
            rows_R[place] = torch.arange(part.first_row, part.first_row + part.num_rows)
            slices_R[place] = index
        device = parameter.device
        return dataclasses.replace(found, rows_R=rows_R.to(device), slices_R=slices_R.to(device))

    return find


def _fits(name: str, rows: _CachedRows, parameter: torch.Tensor, shapes: Mapping[str, tuple[int, int]]) -> bool:
    """Check that the rectangles lie in their tensors, and their rows in the parameter."""
    num_rows, num_columns = as_matrix(name, parameter).shape
    steps = rows.steps or (1,) * len(rows.starts)
    if num_rows != rows.num_rows or not len(rows.tensors) == len(rows.rectangles) == len(rows.starts) == len(steps) > 0:
        return False
    for tensor, part, start, step in zip(rows.tensors, rows.rectangles, rows.starts, steps, strict=True):
        of_rows, of_columns = shapes.get(tensor, (0, 0))
        if min(part.first_row, start, part.first_column) < 0 or min(part.num_rows, step) < 1:
            return False
        if part.num_columns != num_columns:
            return False
        if part.first_row + part.num_rows > of_rows or part.first_column + num_columns > of_columns:
            return False
        if part.first_column != rows.first_column or start + (part.num_rows - 1) * step >= num_rows:
            return False
    return True


def _is_proved(order: Order, kept: _CachedOrder) -> bool:
    """Check that every parameter was found where the cached order has it."""
    is_same = order.rows.keys() == kept.rows.keys() and order.packed == kept.packed
    return is_same and order.handed_over == kept.handed_over and not order.unknown
