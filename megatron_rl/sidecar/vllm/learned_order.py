"""Learns where a vLLM model puts the numbers that it is given.

In place of weights, the model loads tensors whose numbers encode their own place: each row of a parameter then shows
which row of which tensor it was copied from. As a check, random numbers are loaded in the same way and must be found in
the same places.

Learning loads the model five times or more, so the order is kept on disk. An order from there is proved by one load of
random numbers, which is the last step of learning too. So the file need not be trusted:

- an order is used only if every parameter of the model holds the random numbers that it names for it;
- an order that leaves any parameter out is neither kept nor used: it is learned at each start.

Letters: R rows and C columns of a parameter, or of a tensor, seen as a matrix.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.records.append_file import make_private_folder, write_private
from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.derived import find_quantizing, list_derived
from megatron_rl.sidecar.vllm.held import (
    Order,
    ParameterRows,
    Readings,
    Rectangle,
    as_matrix,
    get_layer,
    observe_params,
)

# Digits are encoded as the bits of positive normal two-byte floats: those of bfloat16 begin at 128, float16's at 1024.
_BASE = 1 << 14
_FIRST = 1024
_SPREAD = 64
# A bias of what the workers sum: the first one adds it for all, and the others hold zeros.
_OF_FIRST_WORKER = ".w2_bias"

Load = Callable[[Mapping[str, torch.Tensor]], None]
Find = Callable[[str, torch.Tensor, bool], ParameterRows | None]
"""Names where a parameter's rows come from, given its name, itself, and whether it is looked at in place."""


def learn_order(model: torch.nn.Module, specs: Sequence[TensorSpec], dtype: torch.dtype, load: Load) -> Order:
    """Load numbers that encode places, in place of tensors with these names and shapes, and read the parameters.

    The model holds no real weights afterwards.
    """
    code = _find_code(dtype)
    questions = [_Question(index, spec, code, dtype) for index, spec in enumerate(specs)]
    which = _ask(model, load, questions, lambda question: torch.tensor([[question.index]]), code)
    row = _ask(model, load, questions, lambda question: torch.arange(question.num_rows)[:, None], code)
    column = _ask(model, load, questions, lambda question: torch.arange(question.num_columns)[None], code)

    def find(name: str, parameter: torch.Tensor, is_in_place: bool) -> ParameterRows | None:
        answers = [readings.get(is_in_place).get(name) for readings in (which, row, column)]
        return _rows(questions, answers, as_matrix(name, parameter).shape[1], parameter.device)

    return prove_order(model, specs, dtype, load, find)


def prove_order(
    model: torch.nn.Module, specs: Sequence[TensorSpec], dtype: torch.dtype, load: Load, find: Find
) -> Order:
    """Load random numbers, and keep what `find` names for a parameter if it holds the numbers from there."""
    code = _find_code(dtype)
    given = {spec.name: _Question(index, spec, code, dtype).random() for index, spec in enumerate(specs)}
    found: dict[tuple[str, bool], ParameterRows] = {}
    # These are compared with the tensors that they follow from, of which they may hold rows once more.
    derived = list_derived(model)

    def is_found(name: str, parameter: torch.Tensor, is_in_place: bool) -> bool:
        rows = None if name in derived else find(name, parameter, is_in_place)
        if rows is None:
            return name.endswith(_OF_FIRST_WORKER) and not parameter.any()
        wanted = [_digest_part(given[name], part) for name, part in zip(rows.tensors, rows.rectangles, strict=True)]
        found[name, is_in_place] = rows
        return torch.equal(rows.digests(name, parameter, dtype).cpu(), torch.stack(wanted))

    with observe_params(model, is_found) as readings:
        load(given)
    in_place = {name for name, is_right in readings.in_place.items() if is_right}
    quantized = _find_quantized(readings)
    packed = {name for name, is_right in readings.handed_over.items() if is_right} - in_place
    quantizing = find_quantizing(model)
    packed -= {name for name in packed if name not in quantized and get_layer(name) in quantizing}
    all_read = (readings.in_place.keys() | readings.handed_over.keys()) - derived
    zeros = frozenset(name for name in in_place | packed if (name, name in in_place) not in found)
    return Order(
        rows={name: found[name, name in in_place] for name in sorted((in_place | packed) - zeros)},
        packed=frozenset(packed),
        handed_over=frozenset(readings.handed_over),
        unknown=tuple(sorted(all_read - in_place - packed - quantized - _find_second_names(model, in_place))),
        zeros=zeros,
        derived=frozenset(quantized),
    )


def _find_quantized(readings: Readings[bool]) -> set[str]:
    """Find the quantized parameters of layers that hold, in all of them, what follows from the loaded numbers."""
    wrong = {get_layer(name) for name, is_right in readings.derived.items() if not is_right}
    for name, is_right in readings.handed_over.items():
        if not (is_right or readings.in_place.get(name)):
            wrong.add(get_layer(name))
    return {name for name in readings.derived if get_layer(name) not in wrong}


def _find_second_names(model: torch.nn.Module, names: Collection[str]) -> set[str]:
    """Return the other names of these parameters: a layer may have a parameter of another one, as experts a bias."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in every if first[id(parameter)] in names and first[id(parameter)] != name}


def _find_code(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype is torch.float16 else torch.bfloat16


@dataclasses.dataclass(frozen=True)
class _Question:
    """A replacement for a tensor: its numbers show where the model puts them."""

    index: int
    spec: TensorSpec
    code: torch.dtype
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.spec.shape[0]

    @property
    def num_columns(self) -> int:
        return self.spec.num_elements // self.spec.shape[0]

    def filled(self, digits: torch.Tensor) -> torch.Tensor:
        """Spread digits over the tensor.

        The digits have two dimensions, one of length 1, so that a view takes no memory.
        """
        values = (digits + _FIRST).to(torch.int16).view(self.code).to(self.dtype)
        return values.expand(self.num_rows, self.num_columns).reshape(self.spec.shape)

    def random(self) -> torch.Tensor:
        """Make random numbers in which no two elements have the same neighbours.

        Each row begins inside the previous row, so that few numbers must be drawn.
        """
        generator = torch.Generator().manual_seed(self.index)
        count = (self.num_rows - 1) * _SPREAD + self.num_columns
        bits = torch.randint(_FIRST, _FIRST + _BASE, (count,), dtype=torch.int16, generator=generator)
        values = bits.view(self.code).to(self.dtype)
        return values.as_strided((self.num_rows, self.num_columns), (_SPREAD, 1)).reshape(self.spec.shape)


def _ask(
    model: torch.nn.Module,
    load: Load,
    questions: Sequence[_Question],
    numbers: Callable[[_Question], torch.Tensor],
    code: torch.dtype,
) -> Readings[torch.Tensor]:
    """Load numbers digit by digit, and read those in the first column of every parameter; -1 if a row has none."""

    def read(name: str, parameter: torch.Tensor, is_in_place: bool) -> torch.Tensor:
        digits_R = as_matrix(name, parameter)[:, 0].to(code).view(torch.int16).to(torch.int64).cpu() - _FIRST
        return digits_R.where((digits_R >= 0) & (digits_R < _BASE), -1)

    largest = max(int(numbers(question).max()) for question in questions)
    answers: Readings[torch.Tensor] = Readings()
    power = 1
    while power == 1 or power <= largest:
        with observe_params(model, read) as readings:
            load({question.spec.name: question.filled(numbers(question) // power % _BASE) for question in questions})
        for is_in_place in (False, True):
            known = answers.get(is_in_place)
            for name, digits_R in readings.get(is_in_place).items():
                known[name] = _with_digits(known.get(name), digits_R, power)
        power *= _BASE
    return answers


def _with_digits(numbers_R: torch.Tensor | None, digits_R: torch.Tensor, power: int) -> torch.Tensor:
    if numbers_R is None:
        return digits_R
    return (numbers_R + power * digits_R).where((numbers_R >= 0) & (digits_R >= 0), -1)


def _rows(
    questions: Sequence[_Question], answers: Sequence[torch.Tensor | None], num_columns: int, device: torch.device
) -> ParameterRows | None:
    """Return the rectangles that the rows' answers name; None if answers are missing or impossible."""
    if any(answer is None for answer in answers):
        return None
    which_R, row_R, column_R = (answer for answer in answers if answer is not None)
    is_padding_R = (which_R < 0) | (row_R < 0) | (column_R < 0)
    columns = column_R[~is_padding_R].unique().tolist()
    if len(columns) != 1 or int(which_R.max()) >= len(questions):
        return None
    tensors: list[str] = []
    rectangles: list[Rectangle] = []
    first_rows: list[int] = []
    steps: list[int] = []
    slices_R = torch.full_like(which_R, -1)
    for start, num_rows, step in _find_runs(which_R, row_R, is_padding_R):
        question = questions[int(which_R[start])]
        part = Rectangle(int(row_R[start]), columns[0], num_rows, num_columns)
        if part.first_row + part.num_rows > question.num_rows or columns[0] + num_columns > question.num_columns:
            return None
        slices_R[start : start + num_rows * step : step] = len(tensors)
        tensors.append(question.spec.name)
        rectangles.append(part)
        first_rows.append(start)
        steps.append(step)
    return ParameterRows(
        tensors=tuple(tensors),
        rectangles=tuple(rectangles),
        starts=tuple(first_rows),
        first_column=columns[0],
        rows_R=row_R.where(slices_R >= 0, 0).to(device),
        slices_R=slices_R.where(slices_R >= 0, len(tensors)).to(device),
        steps=tuple(steps) if max(steps, default=1) > 1 else (),
    )


def _find_runs(
    which_R: torch.Tensor, row_R: torch.Tensor, is_padding_R: torch.Tensor
) -> Iterator[tuple[int, int, int]]:
    """Yield the first row, the number of rows and the step of each run of rows that follow each other in a tensor.

    A run with a step of 2 lies in turn with another, as the gates and ups of an expert may.
    """
    next_R, second_R = (_follows(which_R, row_R, is_padding_R, step) for step in (1, 2))
    # Neighbours that follow each other are a run of their own.
    has_neighbour_R = next_R.clone()
    has_neighbour_R[1:] |= next_R[:-1]
    second_R[:-1] &= ~has_neighbour_R[:-1] & ~has_neighbour_R[1:]
    second_R[:-2] &= ~has_neighbour_R[2:]
    is_first_R = ~is_padding_R
    is_first_R[1:] &= ~next_R[:-1]
    is_first_R[2:] &= ~second_R[:-2]
    starts = torch.nonzero(is_first_R)[:, 0]
    steps = 1 + second_R[starts].long()
    # The last row of a run is the first at or after its start that no row of the run follows.
    lasts = {
        (step, first): torch.nonzero(~follows_R[first::step])[:, 0] * step + first
        for step, follows_R in ((1, next_R), (2, second_R))
        for first in range(step)
    }
    for start, step in zip(starts.tolist(), steps.tolist(), strict=True):
        possible = lasts[step, start % step]
        last = int(possible[torch.searchsorted(possible, start)])
        yield start, (last - start) // step + 1, step


def _follows(which_R: torch.Tensor, row_R: torch.Tensor, is_padding_R: torch.Tensor, step: int) -> torch.Tensor:
    """Check for each row whether the one `step` rows further is the next row of the same tensor."""
    found_R = torch.zeros_like(is_padding_R)
    is_same_R = (which_R[step:] == which_R[:-step]) & (row_R[step:] == row_R[:-step] + 1)
    found_R[:-step] = is_same_R & ~is_padding_R[:-step] & ~is_padding_R[step:]
    return found_R


def _digest_part(tensor: torch.Tensor, part: Rectangle) -> torch.Tensor:
    matrix_RC = tensor.reshape(tensor.shape[0], -1)
    rows_RC = matrix_RC[part.first_row : part.first_row + part.num_rows]
    slice_RC = rows_RC[:, part.first_column : part.first_column + part.num_columns]
    return digest(slice_RC, part.first_row, part.first_column)


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


def list_facts(rank: int, world_size: int) -> dict[str, Any]:
    """Return everything that decides the order of weights beyond the names and shapes of tensors and parameters."""
    import vllm
    from vllm.platforms import current_platform

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": current_platform.device_type,
        "rank": rank,
        "world_size": world_size,
    }


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
