"""Learns where a vLLM model puts the numbers that it is given.

In place of weights, the model loads tensors whose numbers encode their own place: each row of a parameter then shows
which row of which tensor it was copied from. As a check, random numbers are loaded in the same way and must be found in
the same places.

Letters: R rows and C columns of a parameter, or of a tensor, seen as a matrix.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.derived import list_derived
from megatron_rl.sidecar.vllm.held import (
    Order,
    ParameterRows,
    Readings,
    Rectangle,
    as_matrix,
    get_layer,
    observe_params,
)
from megatron_rl.sidecar.vllm.quantized import find_quantizing

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
