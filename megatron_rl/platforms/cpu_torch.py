"""The `torch` that megatron's modules import on the CPU: torch itself, but "cuda" means the host.

Only modules of megatron get it: any other `import torch` gives torch, untouched. Methods of tensors and modules are
shared by all callers, so each replaced method looks at its caller, and works as before unless megatron calls it. A CPU
does all work in the order in which it is asked for, so streams and events have nothing to do.
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


class Event:
    """A marker in the only queue, which is always passed."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Takes what torch.cuda.Event takes."""

    def record(self, stream: Any = None) -> None:
        """Nothing is queued, so there is nothing to mark."""

    def wait(self, stream: Any = None) -> None:
        """What was asked for earlier is done."""

    def synchronize(self) -> None:
        """What was asked for earlier is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between two markers: nothing is queued, so no time passes between them."""
        return 0.0


class Stream:
    """The only queue."""

    device = DEVICE
    cuda_stream = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Takes what torch.cuda.Stream takes."""

    def wait_stream(self, stream: Any) -> None:
        """What was asked for earlier is done."""

    def wait_event(self, event: Any) -> None:
        """What was asked for earlier is done."""

    def synchronize(self) -> None:
        """What was asked for earlier is done."""

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        """The queue stays the only one."""


class AnyIndex:
    """A sequence whose every element is the same, whatever the index: one device stands for all."""

    def __init__(self, element: Any) -> None:
        self._element = element

    def __getitem__(self, index: Any) -> Any:
        return self._element


def nothing(*arguments: Any, **keywords: Any) -> None:
    """Takes anything and does nothing."""


def zero(*arguments: Any, **keywords: Any) -> int:
    """Takes anything and returns 0."""
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
    """megatron makes its tensors on torch.cuda.current_device(): that is the host, the one device there is."""
    return {
        "current_device": lambda: DEVICE,
        "device_count": lambda: 1,
        "empty_cache": nothing,
        "is_available": lambda: False,
        "set_device": nothing,
        "synchronize": nothing,
    }


def streams() -> dict[str, Any]:
    """megatron overlaps communication with work on other streams: here there is one, and all of it is done."""
    return {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: _STREAM,
        "default_stream": lambda device=None: _STREAM,
        "set_stream": nothing,
        "stream": lambda stream: contextlib.nullcontext(),
    }


def random_numbers() -> dict[str, Any]:
    """megatron's tracker forks the device's random numbers: those of the host. Without this no fork is ever undone."""

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    return {
        "_lazy_call": lambda function, **keywords: function(),
        "_lazy_init": nothing,
        "default_generators": AnyIndex(torch.default_generator),
        "manual_seed": seed,
        "manual_seed_all": seed,
        **random_state(),
    }


def random_state() -> dict[str, Any]:
    """The same state under the names that megatron reads it by."""
    return {
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
    }


def memory_statistics() -> dict[str, Any]:
    """megatron logs the figures of CUDA's allocator, which does not run here."""
    return {
        "max_memory_allocated": zero,
        "max_memory_reserved": zero,
        "memory_allocated": zero,
        "memory_reserved": zero,
        "memory_stats": lambda device=None: collections.defaultdict(int),
        "reset_peak_memory_stats": nothing,
    }


def profiler_ranges() -> dict[str, Any]:
    """megatron marks ranges for NVIDIA's profiler; a CPU build of torch raises on them."""
    return {
        "mark": nothing,
        "range": lambda *arguments, **keywords: contextlib.nullcontext(),
        "range_pop": zero,
        "range_push": zero,
    }


def split_sizes() -> dict[str, Any]:
    """The MoE dispatcher moves its split sizes to the host only if they are on CUDA: here they arrive as tensors."""
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
    """megatron writes device="cuda" where it makes tensors, and pins those it makes on the host for a copy to CUDA."""
    return {name: _on_the_host(getattr(torch, name)) for name in FACTORIES}


@dataclasses.dataclass(frozen=True)
class Replacement:
    """Names of one module of torch and what megatron finds there instead. The docstring of `names` is the reason."""

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
    """A module in which some names are replaced; the others are looked up in the original module, each time."""

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
    """megatron's view of each module of torch in which something is replaced."""
    names: dict[str, dict[str, Any]] = {}
    for replacement in replacements:
        names.setdefault(replacement.module, {}).update(replacement.names())
    views: dict[ModuleType, Namespace] = {}
    # The deepest first, because a module's view holds the views of its submodules.
    for module in sorted(names, key=lambda name: name.count("."), reverse=True):
        original = _module(module)
        view = Namespace(original, names[module])
        views[original] = view
        parent, _, child = module.rpartition(".")
        if parent:
            names[parent][child] = view
    return views


def build_import_function(replacements: Sequence[Replacement] = REPLACEMENTS) -> Callable[..., ModuleType]:
    """An `__import__` that gives megatron's view of torch."""
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
    """megatron moves tensors with .cuda(); a CPU build of torch raises."""
    answer_megatron(torch.Tensor, "cuda", lambda tensor, *arguments, **keywords: tensor)


def module_cuda() -> None:
    """megatron moves modules with .cuda(); a CPU build of torch raises."""
    answer_megatron(torch.nn.Module, "cuda", lambda module, *arguments, **keywords: module)


def tensor_type() -> None:
    """megatron's optimizers sort parameters by type(), and raise on one that is not called torch.cuda.*Tensor."""
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


def tensor_method_reasons() -> list[tuple[str, str]]:
    return [(name, inspect.cleandoc(patch.__doc__ or "")) for name, patch in METHODS]


def answer_megatron(owner: type, name: str, answer: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **keywords: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        function = answer if caller.startswith("megatron.") else original
        return function(self, *arguments, **keywords)

    setattr(owner, name, method)


_FORK_WARNING = "CPU RNG state changed within GPU RNG context"


def disable_jit_fuser(module: ModuleType) -> None:
    """torch.compile would compile each fused function with a C++ compiler, for minutes, at its first call."""
    if not hasattr(module, "disable_jit_fuser"):
        raise unknown_megatron(f"{module.__name__} has no disable_jit_fuser")
    module.disable_jit_fuser()


def silence_fork_warning(module: ModuleType) -> None:
    """A fork of the device's random numbers warns if the host's changed within: here the two are the same."""
    logging.getLogger(module.__name__).addFilter(lambda record: _FORK_WARNING not in record.getMessage())


PATCHES = (
    Patch("jit fuser", "megatron.core.jit", disable_jit_fuser),
    Patch("warning of the RNG fork", "megatron.core.tensor_parallel.random", silence_fork_warning),
)
