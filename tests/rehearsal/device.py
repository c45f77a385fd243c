"""An emulated device: tensors say that they lie on "npu:0", and their bytes lie on the host.

Every operation on such a tensor passes through `run`. It refuses operands of two devices as a device does, tells the
streams which blocks are read and written, notes where the host waits, and computes on the bytes. So it holds for
autograd, modules, collectives of gloo and every thread. `prepare` makes torch know the device, once a process.

A collective counts as an operation on the stream that it is called on, and a backward pass runs on the default one.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from tests.rehearsal.streams import Block, DeviceFault, Stream, locate, state
from tests.rehearsal.syncs import READ_BY_HOST, log

DEVICE = torch.device("cpu")  # until `prepare`, which gives the name "npu" to a backend of torch's
HOST = torch.device("cpu")
generator = torch.Generator()

ATEN = torch.ops.aten
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
# The first and last address of memory of the host that is page-locked.
pinned: dict[int, int] = {}
# Copies to the host since the list was last cleared.
fetched: list["Fetched"] = []
# Names of the operations on floating-point numbers.
operators: set[str] = set()
_libraries: list[torch.library.Library] = []
# Pinned memory that was allocated here. It stays alive, so no other memory gets its address.
_allocated: list[torch.UntypedStorage] = []


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A copy to the host."""

    num_bytes: int
    is_pinned: bool
    is_blocking: bool


class OnDevice(torch.Tensor):
    """Bytes on the host, and the block of the device that they stand for.

    `x.data = y` may give a parameter bytes of the host, as it may on a device: then it has no block.
    """

    host: torch.Tensor
    block: Block | None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: torch.Tensor, block: Block | None) -> "OnDevice":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=DEVICE,
        )

    def __init__(self, host: torch.Tensor, block: Block | None) -> None:
        self.host = host
        self.block = block

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host, self.block = (value.host, value.block) if isinstance(value, OnDevice) else (value, None)

    @property
    def is_cuda(self) -> bool:
        """False, as on an NPU; megatron asks where it means any accelerator."""
        return self.block is not None and asked_by_megatron()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        if self.block is not None and not force:
            raise TypeError("can't convert npu:0 device type tensor to numpy. Use Tensor.cpu() first")
        return self.detach().cpu().numpy()

    def tolist(self) -> Any:
        return (self.detach().cpu() if self.block is not None else self.host).tolist()

    def record_stream(self, stream: Stream) -> None:
        assert self.block is not None
        self.block.remains.may_outlive.add(stream.number)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnDevice({self.host})"

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        copied.__dict__.update({name: value for name, value in vars(self).items() if name not in ("host", "block")})
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return to_device, (self.detach().cpu(),)


def to_device(host: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the device."""
    return host.to(DEVICE)


def is_there(value: Any) -> bool:
    """Check whether this is a tensor on the device."""
    return isinstance(value, OnDevice) and value.block is not None


def asked_by_megatron() -> bool:
    """Check whether the caller's caller belongs to megatron."""
    return sys._getframe(2).f_globals.get("__name__", "").startswith("megatron.")


def _new(host: torch.Tensor, where: str | None = None) -> OnDevice:
    return OnDevice(host, Block(host.untyped_storage().nbytes(), where or locate()))


def pin(host: torch.Tensor) -> torch.Tensor:
    """Pin a tensor's memory: only from pinned memory a copy to the device does not wait."""
    _allocated.append(storage := host.untyped_storage())
    pinned[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()
    return host


def is_pinned(host: torch.Tensor) -> bool:
    return any(start <= host.data_ptr() < end for start, end in pinned.items())


def bytes_of(value: Any) -> Any:
    """Return the host's tensor that a tensor of the device stands for."""
    return value.host if isinstance(value, OnDevice) else value


def run(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Do what an operation does on a device."""
    if function is ATEN._to_copy.default and is_there(args[0]) and _target(kwargs, True) == HOST:
        return _fetch(args[0], kwargs)
    if function is ATEN.copy_.default and is_there(args[0]) != is_there(args[1]):
        return _copy_between(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False)))
    if function is ATEN._has_compatible_shallow_copy_type.default:
        return isinstance(args[0], OnDevice)
    return _compute(function, args, kwargs)


@dataclasses.dataclass(frozen=True)
class _Operator:
    """The properties of an operator, which its schema has and which take long to ask for."""

    name: str
    written: tuple[tuple[int, str], ...]
    """Places and names of the operands that the schema marks as written."""
    is_collective: bool
    """True: a collective, which writes all its operands."""
    is_view: bool
    takes_numbers: bool
    """True: operands may be numbers of the host."""
    is_random: bool


@functools.cache
def _describe(function: Any) -> _Operator:
    schema, tags = function._schema, function.tags
    name = schema.name
    return _Operator(
        name,
        tuple(
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        function.namespace == "c10d",
        any(returned.alias_info is not None for returned in schema.returns),
        torch.Tag.pointwise in tags or name in ("aten::masked_fill", "aten::masked_fill_"),
        torch.Tag.nondeterministic_seeded in tags,
    )


def _list_leaves(value: Any, found: list[Any]) -> list[Any]:
    """Add the leaves of an operator's operands: it takes plain containers, in which pytree would look longer."""
    if type(value) in (list, tuple):
        for one in value:
            _list_leaves(one, found)
    elif type(value) is dict:
        _list_leaves([*value.values()], found)
    else:
        found.append(value)
    return found


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the same containers with their leaves changed."""
    if type(value) in (list, tuple):
        return type(value)([_map(change, one) for one in value])
    if type(value) is dict:
        return {name: _map(change, one) for name, one in value.items()}
    return change(value)


def _compute(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    operator = _describe(function)
    name, where = operator.name, None
    leaves = _list_leaves((args, kwargs), [])
    there = [leaf for leaf in leaves if is_there(leaf)]
    if there:
        if name not in operators and any(leaf.is_floating_point() for leaf in there):
            operators.add(name)
        _refuse_mixed(operator, leaves)
        if name in READ_BY_HOST or (name in _INDEXED and _indices_are_read(args)):
            log.add(name.removeprefix("aten::"))
    written = [block for value in _written(operator, args, kwargs, leaves) if (block := _block(value)) is not None]
    if there and (written or not operator.is_view):
        where = locate()
        read = [block for value in there if (block := _block(value)) not in written]
        state.operate(name, where, _once(read), _once(written))
    target = _target(kwargs, bool(there))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": HOST}
    found = _with_own_randomness(function, operator, _map(bytes_of, args), _map(bytes_of, kwargs))
    known = {id(leaf.host): leaf for leaf in leaves if isinstance(leaf, OnDevice)}
    for leaf in known.values():
        if leaf.host.shape != leaf.shape or leaf.host.stride() != leaf.stride():
            torch.Tensor.data.__set__(leaf, OnDevice(leaf.host, leaf.block))  # type: ignore[attr-defined]
    blocks = {leaf.host.untyped_storage()._cdata: leaf.block for leaf in there}

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        if target == HOST:
            return value
        block = blocks.get(value.untyped_storage()._cdata)
        if block is not None:
            return OnDevice(value, block)
        return _made(value, name, where)

    return _map(wrap, found)


def as_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of host tensors as an operator of the device that writes only its results."""

    @functools.wraps(function)
    def operator(*args: Any, **kwargs: Any) -> Any:
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        assert all(is_there(leaf) for leaf in leaves), "an operand on the host"
        name = function.__name__
        state.operate(name, locate(), _once([_block(leaf) for leaf in leaves]), [])
        found = function(*pytree.tree_map(bytes_of, args), **pytree.tree_map(bytes_of, kwargs))
        return pytree.tree_map(lambda value: _made(value, name) if isinstance(value, torch.Tensor) else value, found)

    return operator


def _made(host: torch.Tensor, name: str, where: str | None = None) -> OnDevice:
    """Return the result of an operation: new memory, which it wrote."""
    where = where or locate()
    made = _new(host, where)
    assert made.block is not None
    state.operate(name, where, [], [made.block])
    return made


def _target(kwargs: dict[str, Any], is_any_there: bool) -> torch.device:
    """Return the device of the results."""
    device = kwargs.get("device")
    if device is not None:
        return DEVICE if torch.device(device).type == DEVICE.type else HOST
    return DEVICE if is_any_there else HOST


def _block(value: Any) -> Block | None:
    return value.block if isinstance(value, OnDevice) else None


def _once(blocks: list[Any]) -> list[Any]:
    return list({id(block): block for block in blocks}.values())


def _written(operator: _Operator, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> list[Any]:
    """Return the operands that are written."""
    if operator.is_collective:
        return leaves
    return _list_leaves(
        [args[place] if place < len(args) else kwargs.get(name) for place, name in operator.written], []
    )


def _refuse_mixed(operator: _Operator, leaves: list[Any]) -> None:
    """Refuse operands of the host, except numbers of pointwise operations, and indices."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or is_there(leaf) or operator.name in _INDEXED:
            continue
        if leaf.dim() == 0 and operator.takes_numbers:
            continue
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, npu:0 and cpu! "
            f"({operator.name}, {list(leaf.shape)} on the cpu, at {locate()})"
        )


def _indices_are_read(args: tuple) -> bool:
    """Return True if masks must be counted, or indices of the host copied, before the operation can be queued.

    A fill needs neither.
    """
    indices = [index for index in args[1] if index is not None]
    if not all(map(is_there, indices)):
        return True
    is_fill = len(args) > 2 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    return not is_fill and any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _with_own_randomness(function: Any, operator: _Operator, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Draw from the device's numbers, and leave the host's alone."""
    if not operator.is_random or kwargs.get("generator") is not None:
        return function(*args, **kwargs)
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return function(*args, **kwargs)
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def _copy_between(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if is_there(to):
        _send(to, bytes_of(source), non_blocking)
    else:
        _receive(to, source, non_blocking)
    return to


def _send(to: Any, source: torch.Tensor, non_blocking: bool) -> None:
    """Copy from the host; without waiting, its memory is read as late as can be."""
    use = state.operate("copy to the device", where := locate(), [], [to.block])
    log.add_copy(source.nbytes, is_pinned(source))
    if not (non_blocking and is_pinned(source)):
        to.host.copy_(source)
        log.add("copy to the device")
        return
    host, as_it_was = to.host, source.clone()

    def land() -> None:
        if not _same_bytes(source, as_it_was):
            state.fault(f"the host's memory was changed while it was still being copied to the device ({where})")
        host.copy_(source)

    state.queue_copy(use, to.block, land)


def _receive(to: torch.Tensor, source: Any, non_blocking: bool) -> None:
    """Copy to the host. A copy that does not wait has no numbers in the host's memory until a later wait."""
    use = state.operate("copy to the host", locate(), [source.block], [])
    to = bytes_of(to)
    fetched.append(Fetched(to.nbytes, is_pinned(to), not non_blocking))
    if not non_blocking:
        log.add("copy to the host")
        to.copy_(source.host)
        return
    sent = source.host.clone()
    to.fill_(float("nan") if to.is_floating_point() else 0)
    state.queue_copy(use, None, functools.partial(to.copy_, sent))


def _fetch(source: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    dtype = kwargs.get("dtype") or source.dtype
    to = torch.empty_like(source.host, dtype=dtype, memory_format=kwargs.get("memory_format") or torch.preserve_format)
    _receive(to, source, bool(kwargs.get("non_blocking", False)))
    return to


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy as torch.tensor does."""
    return _copy_between(to, source, non_blocking)


def _read_number(source: Any) -> Any:
    """Read a number as torch.tensor does with tensors."""
    state.operate("item", locate(), [source.block], [])
    log.add("item")
    return ATEN._local_scalar_dense(source.host)


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    return _new(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return _new(torch.empty_strided(size, stride, dtype=dtype))


_KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "_copy_from": _copy_from,
    "_local_scalar_dense": _read_number,
    # As torch_npu has it: without it torch refuses `x.data = y` between the host and a device of another maker.
    "_has_compatible_shallow_copy_type": lambda one, other: isinstance(one, OnDevice),
}


def prepare() -> None:
    """Make torch know the device; a second call does nothing."""
    global DEVICE
    if _libraries:
        return
    backend_registration._setup_privateuseone_for_python_backend(rename="npu")
    DEVICE = torch.device("npu:0")
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
    _libraries.append(library)


__all__ = ["DEVICE", "DeviceFault", "OnDevice", "generator", "is_there", "prepare"]
