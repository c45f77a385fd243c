"""Proof that a vLLM model holds the numbers that it was given, bit for bit, though in another order.

The order is learned once (`learned_order.py`). From then on the digests of the parameters' parts must add up to the
digests of the given tensors.

Some layers, as on a CPU, pack a parameter into a layout of their own and free it. Such a parameter is read just before
that. All others are read in place, after the load.

Layers that quantize are read before it too. What they then hold must be what follows from that by definition
(`derived.py`), bit for bit, at the end of the load.

Letters: R rows and C columns of a parameter, or of a tensor, seen as a matrix.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from megatron_rl.errors import MegatronRLError
from megatron_rl.ops.slices import Slice, build_digester
from megatron_rl.shared.weights.fingerprint import DTYPES, digest, digests_by_row
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.answers import is_sum
from megatron_rl.sidecar.vllm.derived import define

T = TypeVar("T")

# Parameters of several dimensions that hold the biases of experts.
_VECTORS = (".w13_bias", ".w2_bias")
Lanes = tuple[int, ...]
TIED = "lm_head.weight"
"""A tied output layer, which is one tensor in our exports and may be stored twice in a checkpoint."""


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
    derived: frozenset[str] = frozenset()
    """Parameters of layers that quantize: after every load they must hold what follows from those handed over."""


class Readings(Generic[T]):
    """Readings of each parameter at two moments."""

    def __init__(self) -> None:
        self.handed_over: dict[str, T] = {}
        """Readings just before the layer processes the parameter."""
        self.in_place: dict[str, T] = {}
        """Readings in place, after the load."""
        self.derived: dict[str, torch.Tensor] = {}
        """True for a parameter that holds what follows from those handed over."""

    def get(self, is_in_place: bool) -> dict[str, T]:
        return self.in_place if is_in_place else self.handed_over


@contextlib.contextmanager
def observe_params(model: torch.nn.Module, look: Callable[[str, torch.Tensor, bool], T]) -> Iterator[Readings[T]]:
    """Look at the parameters of a model that is loaded in this context.

    Each parameter of a layer that processes its weights is looked at before that. At the end, all parameters are looked
    at in place. `look` gets a parameter's name, the parameter, and whether it is looked at in place.
    """
    names = {layer: name for name, layer in model.named_modules()}
    readings: Readings[T] = Readings()
    wanted: dict[str, _Identity] = {}

    def watched(method: Any) -> Callable[[torch.nn.Module], None]:
        process = method.process_weights_after_loading

        def call(layer: torch.nn.Module) -> None:
            prefix = f"{names[layer]}." if names[layer] else ""
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter.numel():
                    readings.handed_over[prefix + name] = look(prefix + name, parameter, False)
            wanted.update({prefix + name: _identify(tensor) for name, tensor in define(layer, method).items()})
            process(layer)

        return call

    methods: dict[int, Any] = {
        id(method): method
        for layer in names
        if hasattr(method := getattr(layer, "quant_method", None), "process_weights_after_loading")
    }
    for method in methods.values():
        method.process_weights_after_loading = watched(method)
    try:
        yield readings
    finally:
        for method in methods.values():
            del method.process_weights_after_loading
    for name, parameter in model.named_parameters():
        if parameter.numel():
            readings.in_place[name] = look(name, parameter, True)
        if name in wanted:
            readings.derived[name] = wanted[name].is_of(parameter)


class _Identity(NamedTuple):
    """The identity of a tensor's numbers, whatever its strides."""

    dtype: torch.dtype
    shape: torch.Size
    lanes: torch.Tensor

    def is_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Check whether a tensor has these numbers; the answer stays on its device."""
        if (tensor.dtype, tensor.shape) != (self.dtype, self.shape):
            return torch.zeros((), dtype=torch.bool, device=tensor.device)
        return (_identify(tensor).lanes == self.lanes).all()


def _identify(tensor: torch.Tensor) -> _Identity:
    # Quantized weights are kept transposed: this needs no copy of them.
    return _Identity(tensor.dtype, tensor.shape, digest(torch.atleast_2d(tensor.detach()).t().contiguous()))


def as_matrix(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """View a parameter as a matrix: its last dimension becomes the columns; vectors are a single column."""
    parameter = parameter.detach()
    has_vectors = parameter.dim() == 1 or name.endswith(_VECTORS)
    return parameter.reshape(-1, 1 if has_vectors else parameter.shape[-1])


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

    def describe(self, digests: Mapping[str, Sequence[int]]) -> dict[str, Any]:
        """Return what a worker answers about the load of tensors with these digests."""
        return {
            "compared": self.num_compared,
            "parameters": self.num_parameters,
            "uncompared": self.uncompared,
            "shares": {name: {"whole": list(digests[name]), "parts": parts} for name, parts in self.shares.items()},
            "unheld": [name for name in self.unheld if name != TIED],
        }


def join_proofs(of_base: LoadProof, of_adapters: LoadProof) -> LoadProof:
    """Return what both prove."""
    return LoadProof(
        of_base.num_compared + of_adapters.num_compared,
        of_base.num_parameters + of_adapters.num_parameters,
        (*of_base.uncompared, *of_adapters.uncompared),
        {**of_base.shares, **of_adapters.shares},
        of_base.unheld,
        of_base.proved | of_adapters.proved,
    )


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

    with observe_params(model, look) as readings:
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
    if stale := find_stale_derived(order, readings):
        raise NotHeld(
            f"{len(stale)} quantized parameters do not hold what follows from the loaded numbers: {_first(stale)}"
        )
    unheld = sorted(sizes.keys() - {tensor for rows in order.rows.values() for tensor in rows.tensors})
    uncompared = tuple(sorted({*order.rows, *order.zeros, *order.unknown} - read.keys()))
    num_derived = len(order.derived - order.rows.keys())
    num_parameters = len(order.rows) + len(order.zeros) + len(order.unknown) + num_derived
    return LoadProof(len(read) + num_derived, num_parameters, uncompared, shares, tuple(unheld), frozenset(proved))


def find_stale_derived(order: Order, readings: Readings[Any]) -> list[str]:
    """Find the quantized parameters that do not hold what follows from those that were handed over."""
    names = sorted(order.derived & readings.derived.keys())
    are_right = torch.stack([readings.derived[name] for name in names]).tolist() if names else []
    wrong = {name for name, is_right in zip(names, are_right, strict=True) if not is_right}
    return sorted(wrong | order.derived - readings.derived.keys())


def without_layers_of(order: Order, names: Sequence[str]) -> Order:
    """Return the order without all quantized parameters of these parameters' layers, which then are unknown."""
    layers = {get_layer(name) for name in names}
    left_out = frozenset(name for name in order.derived if get_layer(name) in layers)
    return dataclasses.replace(
        order,
        rows={name: rows for name, rows in order.rows.items() if name not in left_out},
        packed=order.packed - left_out,
        derived=order.derived - left_out,
        unknown=tuple(sorted({*order.unknown, *left_out})),
    )


def get_layer(parameter: str) -> str:
    """Return the name of the layer that has a parameter."""
    return parameter.rpartition(".")[0]


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5])
