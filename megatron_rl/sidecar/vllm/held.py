"""Proof that a vLLM model holds the numbers that it was given, bit for bit, though in another order.

The order is learned once. In place of weights, the model loads tensors whose numbers encode their own place: each row
of a parameter then shows which row of which tensor it was copied from. As a check, random numbers are loaded in the
same way and must be found in the same places. From then on the digests of the parameters' parts must add up to the
digests of the given tensors.

Some layers, as on a CPU, pack a parameter into a layout of their own and free it. Such a parameter is read just before
that. All others are read in place, after the load.

Letters: R rows and C columns of a parameter, or of a tensor, seen as a matrix.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.ops.slices import Slice, build_digester
from megatron_rl.shared.weights.fingerprint import DTYPES, digest, digests_by_row
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.answers import is_sum
from megatron_rl.sidecar.vllm.derived import list_derived

T = TypeVar("T")

# Digits are encoded as the bits of positive normal two-byte floats: those of bfloat16 begin at 128, float16's at 1024.
_BASE = 1 << 14
_FIRST = 1024
_SPREAD = 64
# Parameters of several dimensions that hold the biases of experts.
_VECTORS = (".w13_bias", ".w2_bias")
# A bias of what the workers sum: the first one adds it for all, and the others hold zeros.
_OF_FIRST_WORKER = ".w2_bias"

Load = Callable[[Mapping[str, torch.Tensor]], None]
Lanes = tuple[int, ...]


class Rectangle(NamedTuple):
    """Part of a tensor."""

    first_row: int
    first_column: int
    num_rows: int
    num_columns: int


@dataclasses.dataclass(frozen=True)
class ParameterRows:
    """The source of a parameter's rows: rectangles of tensors, one below the other, or two in turn."""

    tensors: tuple[str, ...]
    rectangles: tuple[Rectangle, ...]
    starts: tuple[int, ...]
    """The row of the parameter at which each rectangle begins."""
    first_column: int
    rows_R: torch.Tensor
    """For each row of the parameter, its row in the tensor that it comes from."""
    slices_R: torch.Tensor
    """The index of the rectangle that each row belongs to; the number of rectangles for a row of padding."""
    steps: tuple[int, ...] = ()
    """Rows of the parameter from one row of a rectangle to its next; empty if every step is 1."""

    @property
    def places(self) -> list[slice]:
        """The rows of the parameter that hold each rectangle."""
        steps = self.steps or (1,) * len(self.starts)
        return [
            slice(start, start + (part.num_rows - 1) * step + 1, step)
            for start, step, part in zip(self.starts, steps, self.rectangles, strict=True)
        ]

    def digests(self, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Digest each rectangle in the dtype of the given numbers; return one line for each rectangle.

        If this dtype would round a number of a rectangle, the line of this rectangle is changed, so that it never
        matches.
        """
        num_rows = max(rectangle.first_row + rectangle.num_rows for rectangle in self.rectangles)
        held_RC = as_matrix(name, parameter)
        given_RC = held_RC.to(dtype)
        lines_SL = digests_by_row(given_RC, self.first_column, self.rows_R, num_rows, self.slices_R, len(self.tensors))
        if held_RC.dtype == dtype:
            return lines_SL
        num_rounded_R = (given_RC.to(held_RC.dtype) != held_RC).sum(dim=1)
        num_rounded_S = num_rounded_R.new_zeros(len(self.tensors) + 1).index_add_(0, self.slices_R, num_rounded_R)
        return lines_SL + num_rounded_S[:-1, None]


@dataclasses.dataclass(frozen=True)
class Order:
    """The places of the given tensors in a model's parameters."""

    rows: Mapping[str, ParameterRows]
    """The rows of each parameter that holds numbers of these tensors."""
    packed: frozenset[str]
    """Parameters to read before their layer packs them."""
    handed_over: frozenset[str]
    """Parameters of layers that process their weights after a load: every load must end with that processing."""
    unknown: tuple[str, ...]
    """Parameters whose numbers come from somewhere else."""
    zeros: frozenset[str] = frozenset()
    """Biases that the first worker adds for all, on another one: every load must leave zeros in them."""


class Readings(Generic[T]):
    """Readings of each parameter at two moments."""

    def __init__(self) -> None:
        self.handed_over: dict[str, T] = {}
        """Readings just before the layer processes the parameter."""
        self.in_place: dict[str, T] = {}
        """Readings in place, after the load."""

    def get(self, is_in_place: bool) -> dict[str, T]:
        return self.in_place if is_in_place else self.handed_over


@contextlib.contextmanager
def looking(model: torch.nn.Module, look: Callable[[str, torch.Tensor, bool], T]) -> Iterator[Readings[T]]:
    """Look at the parameters of a model that is loaded in this context.

    Each parameter of a layer that processes its weights is looked at before that. At the end, all parameters are looked
    at in place. `look` gets a parameter's name, the parameter, and whether it is looked at in place.
    """
    names = {layer: name for name, layer in model.named_modules()}
    readings: Readings[T] = Readings()

    def watched(process: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def call(layer: torch.nn.Module) -> None:
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter.numel():
                    full_name = f"{names[layer]}.{name}" if names[layer] else name
                    readings.handed_over[full_name] = look(full_name, parameter, False)
            process(layer)

        return call

    methods: dict[int, Any] = {
        id(method): method
        for layer in names
        if hasattr(method := getattr(layer, "quant_method", None), "process_weights_after_loading")
    }
    for method in methods.values():
        method.process_weights_after_loading = watched(method.process_weights_after_loading)
    try:
        yield readings
    finally:
        for method in methods.values():
            del method.process_weights_after_loading
    for name, parameter in model.named_parameters():
        if parameter.numel():
            readings.in_place[name] = look(name, parameter, True)


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

    with looking(model, is_found) as readings:
        load(given)
    in_place = {name for name, is_right in readings.in_place.items() if is_right}
    packed = {name for name, is_right in readings.handed_over.items() if is_right} - in_place
    all_read = (readings.in_place.keys() | readings.handed_over.keys()) - derived
    zeros = frozenset(name for name in in_place | packed if (name, name in in_place) not in found)
    return Order(
        rows={name: found[name, name in in_place] for name in sorted((in_place | packed) - zeros)},
        packed=frozenset(packed),
        handed_over=frozenset(readings.handed_over),
        unknown=tuple(sorted(all_read - in_place - packed - _find_second_names(model, in_place))),
        zeros=zeros,
    )


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
        with looking(model, read) as readings:
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


def as_matrix(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """View a parameter as a matrix: its last dimension becomes the columns; vectors are a single column."""
    parameter = parameter.detach()
    has_vectors = parameter.dim() == 1 or name.endswith(_VECTORS)
    return parameter.reshape(-1, 1 if has_vectors else parameter.shape[-1])


def _digest_part(tensor: torch.Tensor, part: Rectangle) -> torch.Tensor:
    matrix_RC = tensor.reshape(tensor.shape[0], -1)
    rows_RC = matrix_RC[part.first_row : part.first_row + part.num_rows]
    slice_RC = rows_RC[:, part.first_column : part.first_column + part.num_columns]
    return digest(slice_RC, part.first_row, part.first_column)


class NotHeld(MegatronRLError):
    """The model does not hold the numbers that it was given."""

    def __init__(self, text: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.tensors = tuple(tensors)


@dataclasses.dataclass(frozen=True)
class LoadProof:
    """The facts that are proved about a model after a load."""

    num_compared: int
    """The number of parameters whose digests were compared."""
    num_parameters: int
    """The number of all parameters."""
    uncompared: tuple[str, ...]
    """Names of the other parameters."""
    shares: dict[str, list[tuple[Rectangle, Lanes]]]
    """Digests of rectangles, for tensors that this worker holds in part; other workers hold the rest."""
    unheld: tuple[str, ...]
    """Tensors of which this worker holds no part."""
    proved: frozenset[str]
    """Tensors that this worker was proved to hold whole."""


@contextlib.contextmanager
def digesting(
    model: torch.nn.Module, order: Order, dtypes: Mapping[str, str]
) -> Iterator[Readings[torch.Tensor | None]]:
    """Digest the parameters that a load in this context writes.

    `dtypes` has the dtypes of the tensors that have arrived so far. It grows during the load, because a layer is packed
    as soon as it has all of its tensors.
    """

    def look(name: str, parameter: torch.Tensor, is_in_place: bool) -> torch.Tensor | None:
        return None if is_in_place == (name in order.packed) else _digest_held(order, dtypes, name, parameter)

    with looking(model, look) as readings:
        yield readings


class InPlaceDigester:
    """Digests of parameters that are written where they lie, by loads in which no layer processes its weights.

    Rectangles that hold given numbers in their own dtype are digested together: on a device with kernels in one launch
    for each kind of slice, whatever the number of parameters. A parameter that is wider than its tensors is digested by
    itself.
    """

    def __init__(self, model: torch.nn.Module, order: Order, dtypes: Mapping[str, str]) -> None:
        self._order = order
        self._dtypes = dict(dtypes)
        self._parameters = dict(model.named_parameters())
        self._addresses = _find_addresses(self._parameters)
        self._ranges: dict[str, tuple[torch.dtype, int, int]] = {}
        """The dtype of a parameter that is digested with others, and the range of its rectangles among those."""
        slices: dict[torch.dtype, list[Slice]] = {}
        for name, parameter in self._parameters.items():
            rows = order.rows.get(name)
            given = _find_given_dtype(rows, dtypes, parameter)
            if rows is None or given != parameter.dtype:
                continue
            held_RC, own = as_matrix(name, parameter), slices.setdefault(given, [])
            self._ranges[name] = (given, len(own), len(own) + len(rows.tensors))
            for part, place in zip(rows.rectangles, rows.places, strict=True):
                own.append(Slice(held_RC[place], len(own), part.first_row, part.first_column))
        self._digesters = {dtype: build_digester(own, dtype, len(own)) for dtype, own in slices.items()}

    def is_for(self, model: torch.nn.Module, order: Order, dtypes: Mapping[str, str]) -> bool:
        """Check whether it was made for this order, for tensors of these dtypes, and for where parameters lie now."""
        is_same = self._order is order and self._dtypes == dtypes
        return is_same and self._addresses == _find_addresses(dict(model.named_parameters()))

    def digest(self) -> Readings[torch.Tensor | None]:
        lines = {dtype: digester.digest() for dtype, digester in self._digesters.items()}
        readings: Readings[torch.Tensor | None] = Readings()
        for name, parameter in self._parameters.items():
            if name in self._ranges:
                dtype, first, end = self._ranges[name]
                readings.in_place[name] = lines[dtype][first:end]
            else:
                readings.in_place[name] = _digest_held(self._order, self._dtypes, name, parameter)
        return readings


def _find_addresses(parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in parameters.items()}


def _digest_held(order: Order, dtypes: Mapping[str, str], name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """Digest a parameter's parts in the dtype that its tensors were given in; None if this proves nothing.

    Of a parameter that must hold zeros, count the others.
    """
    if name in order.zeros:
        return parameter.count_nonzero()
    rows = order.rows.get(name)
    given = _find_given_dtype(rows, dtypes, parameter)
    return None if rows is None or given is None else rows.digests(name, parameter, given)


def _find_given_dtype(
    rows: ParameterRows | None, dtypes: Mapping[str, str], parameter: torch.Tensor
) -> torch.dtype | None:
    """Return the one dtype in which a parameter's numbers were given; None if they were rounded or have several."""
    given = set() if rows is None else {DTYPES[dtypes[tensor]] for tensor in rows.tensors if tensor in dtypes}
    # Rounded numbers are not the given ones.
    if len(given) != 1 or any(torch.promote_types(one, parameter.dtype) != parameter.dtype for one in given):
        return None
    return given.pop()


def compare(
    order: Order,
    readings: Readings[torch.Tensor | None],
    given: Mapping[str, Sequence[int]],
    specs: Sequence[TensorSpec],
) -> LoadProof:
    """Compare the digests of the parameters with those of the given tensors; raise NotHeld if they differ."""
    if left := sorted(order.handed_over - readings.handed_over.keys()):
        raise NotHeld(f"the layers of {len(left)} parameters did not process the loaded weights: {_first(left)}")
    read = {
        name: reading
        for name in [*order.rows, *sorted(order.zeros)]
        if (reading := readings.get(name not in order.packed).get(name)) is not None
    }
    digests = {name: lanes_SL for name, lanes_SL in read.items() if name in order.rows}
    counts = [count for name, count in read.items() if name in order.zeros]
    if counts and torch.stack(counts).any():
        raise NotHeld(f"biases that the first worker adds are not zero on this one too: {_first(sorted(order.zeros))}")
    parts: dict[str, dict[Rectangle, Lanes]] = {}
    wrong: set[str] = set()
    # All digests leave the device in one copy.
    lines = iter(torch.cat(list(digests.values())).tolist() if digests else [])
    for name in digests:
        rows = order.rows[name]
        for tensor, part in zip(rows.tensors, rows.rectangles, strict=True):
            lanes = tuple(next(lines))
            if parts.setdefault(tensor, {}).setdefault(part, lanes) != lanes:
                wrong.add(tensor)
    sizes = {spec.name: spec.num_elements for spec in specs}
    shares = {}
    proved = set()
    for tensor, of_tensor in parts.items():
        if sum(part.num_rows * part.num_columns for part in of_tensor) < sizes[tensor]:
            shares[tensor] = list(of_tensor.items())
        elif is_sum(of_tensor.values(), given[tensor]):
            proved.add(tensor)
        else:
            wrong.add(tensor)
    if wrong:
        names = sorted(wrong)
        raise NotHeld(f"{len(names)} tensors do not hold the numbers that were given: {_first(names)}", names)
    unheld = sorted(sizes.keys() - {tensor for rows in order.rows.values() for tensor in rows.tensors})
    uncompared = tuple(sorted({*order.rows, *order.zeros, *order.unknown} - read.keys()))
    num_parameters = len(order.rows) + len(order.zeros) + len(order.unknown)
    return LoadProof(len(read), num_parameters, uncompared, shares, tuple(unheld), frozenset(proved))


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5])
