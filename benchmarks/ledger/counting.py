"""Count what a device would be asked to do: operators, their kernels, and the bytes that these move through its memory.

A counter is a dispatch mode. It sees every operator of torch on tensors of the device "meta", which have shapes and no
values. Each tensor that an operator reads or writes counts once, as it lies there: an expanded dimension has one
element. Views and allocations cost the host time, and the device nothing. An operator counts as one launch.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Kind(StrEnum):
    """Kinds of work, each with a time of its own on the host or the device."""

    PRODUCT = "products"
    ELEMENTWISE = "element-wise and copies"
    NORM_FORWARD = "norms, forward"
    NORM_BACKWARD = "norms, backward"
    ATTENTION = "attention"
    VIEW = "views"
    ALLOCATION = "allocations"
    READ = "reads by the host"


class Call(StrEnum):
    """Ways in which the host makes a call."""

    OPERATOR = "operator"
    TRITON = "triton"
    COMPILED = "compiled"
    """A function that torch.compile wraps."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One call of the host."""

    name: str
    kind: Kind
    part: str
    """The part of the step that makes the call."""
    num_launches: int = 0
    num_bytes: int = 0
    flops: float = 0.0
    width: int = 0
    """The last dimension of what a norm reads."""
    is_strided: bool = False
    """True for an element-wise operator whose operand has gaps or another shape: threads move single elements."""
    call: Call = Call.OPERATOR
    num_keys: float = 0.0
    """The mean number of keys that a row of attention sees."""


ATTENTION = "attention"


@dataclasses.dataclass(frozen=True)
class Routing:
    """The rows that experts get: as many each."""

    num_experts: int
    rows_of_expert: int

    @property
    def num_rows(self) -> int:
        """The number of rows of all experts."""
        return self.num_experts * self.rows_of_expert


_ALLOCATIONS = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::empty_permuted", "aten::set_", "aten::resize_",
}  # fmt: skip
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
# Operators that move elements without computing.
_COPIES = {"aten::cat", "aten::clone", "aten::copy_", "aten::_to_copy"}
# The gradients of slices: zeros are written, then the slice.
_ZEROS_AROUND = {"aten::slice_backward", "aten::select_backward"}
# Operators that replace what they write to, without reading it.
_WRITE_ONLY = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_"}
# Operators that reach only the rows or elements of their first operand that an index names.
_READ_BY_INDEX = {"aten::index_select", "aten::embedding", "aten::gather", "aten::index"}
_WRITE_BY_INDEX = {
    "aten::index_add_", "aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_", "aten::scatter_",
    "aten::scatter_add_",
}  # fmt: skip


class Counter(TorchDispatchMode):
    """Lists what is called while it is active."""

    def __init__(self, routing: Routing | None = None) -> None:
        super().__init__()
        self.routing = routing
        """The answer where the host asks how many rows experts get."""
        self.entries: list[Entry] = []
        self.part = "layers and loss"
        self.micro_batches: list[int] = []
        """The number of entries before each micro-batch."""
        self.is_suspended = False

    def __enter__(self) -> "Counter":
        global _active
        assert _active is None, "another counter is active"
        _active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        global _active
        _active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = answer(function, args, kwargs, self.routing)
        if not self.is_suspended and (entry := describe(function, args, kwargs, found)):
            self.add(entry)
        return found

    def begin_micro_batch(self) -> None:
        """Note that a micro-batch begins."""
        self.micro_batches.append(len(self.entries))

    def list_micro_batch(self) -> list[Entry]:
        """Return the entries of the first of several micro-batches."""
        first, second = self.micro_batches[:2]
        return self.entries[first:second]

    def list_step(self, num_micro_batches: int) -> list[Entry]:
        """Return the entries of a step of more micro-batches, which are all like the first one."""
        if num_micro_batches == len(self.micro_batches):
            return self.entries
        first, more = self.micro_batches[0], num_micro_batches - len(self.micro_batches)
        return self.entries[:first] + self.list_micro_batch() * more + self.entries[first:]

    def add(self, entry: Entry) -> None:
        """Add an entry to the present part."""
        if self.part == ATTENTION and entry.num_launches:
            # Its time follows from the needed work, which has an entry of its own.
            entry = dataclasses.replace(entry, kind=Kind.ATTENTION, flops=0.0)
        self.entries.append(dataclasses.replace(entry, part=self.part))

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count what is called in this context as that part's."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Count nothing in this context."""
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before


_active: Counter | None = None


def active() -> Counter | None:
    """Return the counter that is active; None if there is none."""
    return _active


def answer(function: Any, args: Any, kwargs: Any, routing: Routing | None = None) -> Any:
    """Run an operator. Where the host reads numbers of the device, it finds ones, and for experts the routing's."""
    name = function._schema.name
    if routing is not None:
        if name == "aten::masked_select" and args[0].is_meta:
            return args[0].new_empty(routing.num_rows)
        is_read = name == "aten::_to_copy" and args[0].is_meta and _is_host(kwargs.get("device"))
        if is_read and args[0].shape == (routing.num_experts,):
            return torch.full((routing.num_experts,), routing.rows_of_expert)
    if name == "aten::_local_scalar_dense" and args[0].is_meta:
        return answer_read(args[0])
    if name == "aten::_to_copy" and args[0].is_meta and _is_host(kwargs.get("device")):
        return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    if name == "aten::copy_" and args[1].is_meta and not args[0].is_meta:
        return args[0].fill_(1)
    return function(*args, **kwargs)


def answer_read(source: torch.Tensor) -> Any:
    """Return the number that the host finds in a tensor of one element."""
    return torch.ones((), dtype=source.dtype).item()


def describe(function: Any, args: Any, kwargs: Any, found: Any) -> Entry | None:
    """Describe a call of an operator; None if the device has no part in it."""
    name = function._schema.name
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
    results = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor) and leaf.is_meta]
    if (not tensors and not results) or function.namespace == "c10d":
        return None
    short = name.removeprefix("aten::")
    if name == "aten::_local_scalar_dense" or (name in ("aten::_to_copy", "aten::copy_") and not results):
        return Entry(short, Kind.READ, "", num_launches=1, num_bytes=sum(map(count_bytes, tensors)))
    written = _list_written(function, args, kwargs)
    if name in _ALLOCATIONS:
        return Entry(short, Kind.ALLOCATION, "")
    if not written and _is_view(tensors, results):
        return Entry(short, Kind.VIEW, "")
    num_launches = int(any(tensor.numel() for tensor in (*results, *written)))
    num_bytes = _count_moved(function, tensors, results, written) if num_launches else 0
    if name in _ZEROS_AROUND:
        return Entry(short, Kind.ELEMENTWISE, "", 2 * num_launches, num_bytes + count_bytes(tensors[0]))
    if name in _PRODUCTS:
        one, other = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
        return Entry(short, Kind.PRODUCT, "", num_launches, num_bytes, 2.0 * one.numel() * other.shape[-1])
    is_strided = _is_strided(function, [*tensors, *results])
    return Entry(short, Kind.ELEMENTWISE, "", num_launches, num_bytes, is_strided=is_strided)


def count_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor's elements; those of an expanded dimension are the same ones."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0]
    return math.prod(sizes) * tensor.itemsize


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _is_view(tensors: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Check whether every result lies in the memory of an operand."""
    storages = {tensor.untyped_storage()._cdata for tensor in tensors}
    return bool(results) and all(result.untyped_storage()._cdata in storages for result in results)


def _is_strided(function: Any, tensors: list[torch.Tensor]) -> bool:
    name = function._schema.name
    if name.startswith("aten::_foreach") or not (torch.Tag.pointwise in function.tags or name in _COPIES):
        return False
    large = [tensor for tensor in tensors if tensor.numel() > 1]
    return any(tensor.shape != large[0].shape or not tensor.is_contiguous() for tensor in large)


def _list_written(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """List the operands that the schema marks as written."""
    written = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(args[place] if place < len(args) else kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, torch.Tensor) and leaf.is_meta]


def _count_moved(
    function: Any, tensors: list[torch.Tensor], results: list[torch.Tensor], written: list[torch.Tensor]
) -> int:
    """Count the bytes that an operator reads and writes."""
    name = function._schema.name
    own = {id(tensor) for tensor in written}
    read = [tensor for tensor in tensors if id(tensor) not in own]
    made = [tensor for tensor in results if id(tensor) not in own]
    if name in _READ_BY_INDEX:
        # It reads the rows or elements that it makes.
        return sum(map(count_bytes, (*tensors[1:], *made, *made)))
    if name in _WRITE_BY_INDEX:
        source = tensors[-1]
        times = 1 if name in ("aten::index_copy_", "aten::scatter_") else 2
        return sum(map(count_bytes, read)) + times * source.numel() * written[0].itemsize
    is_replaced = name in _WRITE_ONLY or function._overloadname == "out"
    return sum(map(count_bytes, (*read, *made))) + (1 if is_replaced else 2) * sum(map(count_bytes, written))
