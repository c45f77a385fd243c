"""The `torch` that megatron's modules import on the CPU: torch itself, but "cuda" means the host.

Only modules of megatron get it: any other `import torch` gives torch, untouched. Methods of tensors and modules are
shared by all callers, so each replaced method looks at its caller, and works as before unless megatron calls it. A CPU
does all work in the order of the calls, so streams and events have nothing to do.
"""

import builtins
import collections
import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed

from megatron_rl.platforms.megatron_patches import Patch, unknown_megatron

DEVICE = torch.device("cpu")


def nothing(*arguments: Any, **keywords: Any) -> None:
    """Accept any arguments and do nothing."""


class Event:
    """A marker in the only queue, which is always passed: earlier calls have done their work."""

    __init__ = record = wait = synchronize = nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Return 0 milliseconds between two markers: the queue is always empty."""
        return 0.0


class Stream:
    """The only queue, before and after a context: earlier calls have done their work."""

    device = DEVICE
    cuda_stream = 0
    __init__ = wait_stream = wait_event = synchronize = __exit__ = nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> "Stream":
        return self


def zero(*arguments: Any, **keywords: Any) -> int:
    """Accept any arguments and return 0."""
    return 0


FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_STREAM = Stream()


def the_device() -> dict[str, Any]:
    """Name the host as the only device: megatron makes its tensors on torch.cuda.current_device()."""
    return {
        "current_device": lambda: DEVICE,
        "device_count": lambda: 1,
        "empty_cache": nothing,
        "is_available": lambda: False,
        "set_device": nothing,
        "synchronize": nothing,
    }


def streams() -> dict[str, Any]:
    """Provide one stream whose work is always done: megatron overlaps communication with work on other streams."""
    return {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "set_stream": nothing,
        "stream": lambda stream: contextlib.nullcontext(),
    }


def random_numbers() -> dict[str, Any]:
    """Use the host's random numbers as the device's: megatron's tracker forks these, and otherwise undoes no fork."""

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    return {
        "_lazy_call": lambda function, **keywords: function(),
        "_lazy_init": nothing,
        "default_generators": collections.defaultdict(lambda: torch.default_generator),
        "manual_seed": seed,
        "manual_seed_all": seed,
        **random_state(),
    }


def random_state() -> dict[str, Any]:
    """Provide the same state under the names by which megatron reads it."""
    return {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    }


def memory_statistics() -> dict[str, Any]:
    """Report zeros for CUDA's allocator, which does not run here: megatron logs its figures."""
    return {
        "max_memory_allocated": zero,
        "max_memory_reserved": zero,
        "memory_allocated": zero,
        "memory_reserved": zero,
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "reset_peak_memory_stats": nothing,
    }


def profiler_ranges() -> dict[str, Any]:
    """Ignore the ranges that megatron marks for NVIDIA's profiler: a CPU build of torch raises on them."""
    return {
        "mark": nothing,
        "range": lambda *arguments, **keywords: contextlib.nullcontext(),
        "range_pop": zero,
        "range_push": zero,
    }


def split_sizes() -> dict[str, Any]:
    """Turn split sizes into lists: the MoE dispatcher does so only if they are on CUDA, and passes tensors here."""
    original = torch.distributed.all_to_all_single

    def sizes(value: Any) -> Any:
        return value.tolist() if torch.is_tensor(value) else value

    @functools.wraps(original)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(output, input, sizes(output_split_sizes), sizes(input_split_sizes), group, async_op)

    return {"all_to_all_single": all_to_all_single}


def device_literals() -> dict[str, Any]:
    """Read device="cuda" as the host and pin nothing: megatron writes it, and pins host tensors for a copy to CUDA."""
    return {name: _on_the_host(getattr(torch, name)) for name in FACTORIES}


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Names in a module of torch, with the objects that megatron finds. The docstring of `names` is the reason."""

    module: str
    names: Callable[[], Mapping[str, Any]]

    @property
    def title(self) -> str:
        return f"{self.module}: {self.names.__name__.replace('_', ' ')}"

    @property
    def reason(self) -> str:
        return inspect.cleandoc(self.names.__doc__ or "")


REPLACEMENTS = (
    Replacement("torch", device_literals),
    Replacement("torch.cuda", the_device),
    Replacement("torch.cuda", streams),
    Replacement("torch.cuda", random_numbers),
    Replacement("torch.cuda.random", random_state),
    Replacement("torch.cuda", memory_statistics),
    Replacement("torch.cuda.nvtx", profiler_ranges),
    Replacement("torch.distributed", split_sizes),
)


class Namespace(ModuleType):
    """A module in which some names are replaced; each access to another name goes to the original module."""

    def __init__(self, original: ModuleType, names: Mapping[str, Any]) -> None:
        super().__init__(original.__name__, original.__doc__)
        self.__dict__.update(
            {key: value for key, value in vars(original).items() if key in ("__file__", "__path__", "__spec__")}
        )
        self.__dict__.update(names)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __dir__(self) -> list[str]:
        return dir(self._original)


def build_namespaces(replacements: Sequence[Replacement] = REPLACEMENTS) -> dict[ModuleType, Namespace]:
    """Build megatron's view of each module of torch in which names are replaced."""
    names: dict[str, dict[str, Any]] = {}
    for replacement in replacements:
        names.setdefault(replacement.module, {}).update(replacement.names())
    views: dict[ModuleType, Namespace] = {}
    # The deepest modules come first, because a module's view holds the views of its submodules.
    for module in sorted(names, key=lambda name: name.count("."), reverse=True):
        original = _module(module)
        view = Namespace(original, names[module])
        views[original] = view
        parent, _, child = module.rpartition(".")
        if parent:
            names[parent][child] = view
    return views


def build_import_function(replacements: Sequence[Replacement] = REPLACEMENTS) -> Callable[..., ModuleType]:
    """Build an `__import__` that gives megatron's view of torch."""
    views = build_namespaces(replacements)

    def import_for_megatron(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        module = builtins.__import__(name, globals, locals, fromlist, level)
        return views.get(module, module)

    return import_for_megatron


def _module(name: str) -> ModuleType:
    return functools.reduce(getattr, name.split(".")[1:], torch)  # type: ignore[arg-type]


def _on_the_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        device = keywords.get("device")
        if device is not None and torch.device(device).type == "cuda":
            keywords["device"] = DEVICE
        keywords.pop("pin_memory", None)
        return factory(*arguments, **keywords)

    return make


_TYPE_NAMES = {
    f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16", "Double", "Int", "Long")
}


def tensor_cuda() -> None:
    """Return the tensor itself from .cuda(), by which megatron moves tensors: a CPU build of torch raises."""
    answer_megatron(torch.Tensor, "cuda", lambda tensor, *arguments, **keywords: tensor)


def module_cuda() -> None:
    """Return the module itself from .cuda(), by which megatron moves modules: a CPU build of torch raises."""
    answer_megatron(torch.nn.Module, "cuda", lambda module, *arguments, **keywords: module)


def tensor_type() -> None:
    """Name types torch.cuda.*Tensor: megatron's optimizers sort parameters by type(), and raise on other names."""
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = original(tensor, *arguments, **keywords)
        return _TYPE_NAMES.get(result, result) if isinstance(result, str) else result

    answer_megatron(torch.Tensor, "type", type_name)


METHODS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("torch.Tensor.cuda", tensor_cuda),
    ("torch.nn.Module.cuda", module_cuda),
    ("torch.Tensor.type", tensor_type),
)


def replace_tensor_methods() -> None:
    """Make these methods answer megatron, and only megatron, as if the host were CUDA."""
    for _, patch in METHODS:
        patch()


def list_tensor_methods() -> list[tuple[str, str]]:
    """Return the name of each replaced method, with its reason."""
    return [(name, inspect.cleandoc(patch.__doc__ or "")) for name, patch in METHODS]


def answer_megatron(owner: type, name: str, answer: Callable[..., Any]) -> None:
    """Replace a method by `answer` for callers in megatron; for others it works as before."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        function = answer if caller.startswith("megatron.") else original
        return function(self, *arguments, **keywords)

    setattr(owner, name, method)


_FORK_WARNING = "CPU RNG state changed within GPU RNG context"


def disable_jit_fuser(module: ModuleType) -> None:
    """Turn the fuser off: torch.compile would compile each fused function with a C++ compiler, at its first call.

    That takes minutes.
    """
    if not hasattr(module, "disable_jit_fuser"):
        raise unknown_megatron(f"{module.__name__} has no disable_jit_fuser")
    module.disable_jit_fuser()


def silence_fork_warning(module: ModuleType) -> None:
    """Drop the warning that the host's random numbers changed in a fork of the device's: here the two are the same."""
    logging.getLogger(module.__name__).addFilter(lambda record: _FORK_WARNING not in record.getMessage())


PATCHES = (
    Patch("jit fuser", "megatron.core.jit", disable_jit_fuser),
    Patch("warning of the RNG fork", "megatron.core.tensor_parallel.random", silence_fork_warning),
)
