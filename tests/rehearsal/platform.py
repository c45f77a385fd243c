"""The emulated device as a platform: `select("npu")` returns it in a process of the rehearsal.

Megatron gets a view of torch in which "cuda" means this device, as torch_npu makes it do on an NPU.
"""

import collections
import contextlib
import functools
import os
import time
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl import platforms
from megatron_rl.ops.shared_prompt.backends import flash_npu
from megatron_rl.platforms import MemoryFigures, Platform, cpu_torch, host, sum_in_fixed_order
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.platforms.cpu_torch import Replacement, nothing
from megatron_rl.platforms.megatron_patches import Patch, replace_import
from tests.kernels.npu_operators import NpuOperators
from tests.rehearsal import device
from tests.rehearsal.streams import DEFAULT, Event, Stream, state
from tests.rehearsal.syncs import log

TOTAL_BYTES = 1 << 34
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


class RehearsedPlatform(Platform):
    """One emulated device a rank; gloo between them."""

    name = "npu"
    device_type = "npu"
    collective_backend = "gloo"
    weight_transports = ("shm",)

    @property
    def unsupported_fusions(self) -> Mapping[str, bool]:
        return CpuPlatform().unsupported_fusions

    def _prepare(self) -> None:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        host.share_gloo_device()
        device.prepare()
        # A group's backend follows from the device that tensors say they lie on.
        dist.Backend.backend_capability["gloo"].append("npu")
        flash_npu._import_operators = _operators
        _replace_methods()
        replace_import(cpu_torch.build_import_function(REPLACEMENTS))

    def _megatron_patches(self) -> tuple[Patch, ...]:
        return cpu_torch.PATCHES

    def set_device(self, local_rank: int) -> None:
        """Do nothing: each rank has a device of its own, with number 0."""

    def place(self, num_threads: int) -> None:
        """Do nothing: the device's cores are not the host's."""

    def device(self) -> torch.device:
        return device.DEVICE

    def synchronize(self) -> None:
        state.wait_for_all()

    def stream(self) -> Any:
        return Stream()

    def current_stream(self) -> Any:
        return state.current()

    def on(self, stream: Any) -> AbstractContextManager:
        return state.on(stream)

    def host_copy(self, values: torch.Tensor) -> torch.Tensor:
        return device.pin(values.cpu().clone())

    def page_lock(self, mapped: torch.Tensor) -> str | None:
        device.pinned[mapped.data_ptr()] = mapped.data_ptr() + mapped.nbytes
        return None

    def page_unlock(self, mapped: torch.Tensor) -> None:
        del device.pinned[mapped.data_ptr()]

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return device.pin(torch.empty(num_bytes, dtype=torch.uint8))

    def event(self) -> Any:
        return Event()

    def mark(self) -> Any:
        event = Event()
        event.record()
        return event, time.monotonic()

    def seconds_between(self, first: Any, last: Any) -> float:
        log.add("seconds_between")
        return last[1] - first[1]

    def rng_state(self) -> torch.Tensor:
        return device.generator.get_state()

    def set_rng_state(self, new_state: torch.Tensor) -> None:
        device.generator.set_state(new_state)

    def seed(self, seed: int) -> None:
        device.generator.manual_seed(seed)

    def choose_fixed_order(self) -> None:
        sum_in_fixed_order({})

    def memory(self) -> MemoryFigures:
        return MemoryFigures(state.allocated, state.peak, TOTAL_BYTES)

    def smallest_device(self, num_devices: int) -> int | None:
        return TOTAL_BYTES

    def reset_peak_memory(self) -> None:
        state.reset_peak()


def install() -> None:
    """Set this process up for the emulated device, in place of a real NPU."""
    platform = RehearsedPlatform()
    original = platforms._platform
    platforms._platform = lambda name: platform if name == "npu" else original(name)
    platform.install()


def the_device() -> dict[str, Any]:
    """Return the device's functions under CUDA's names."""
    return {
        "current_device": lambda: device.DEVICE,
        "device_count": lambda: 1,
        "empty_cache": nothing,
        "is_available": lambda: True,
        "set_device": nothing,
        "synchronize": lambda device=None: state.wait_for_all(),
    }


def streams() -> dict[str, Any]:
    """Return streams whose order is checked."""
    return {
        "Event": Event,
        "Stream": Stream,
        "current_stream": lambda device=None: state.current(),
        "default_stream": lambda device=None: DEFAULT,
        "set_stream": state.set_current,
        "stream": lambda stream: contextlib.nullcontext() if stream is None else state.on(stream),
    }


def random_numbers() -> dict[str, Any]:
    """Return functions for the device's own random numbers."""

    def seed(value: int) -> None:
        device.generator.manual_seed(int(value))

    return {
        "_lazy_call": lambda function, **keywords: function(),
        "_lazy_init": nothing,
        "default_generators": collections.defaultdict(lambda: device.generator),
        "manual_seed": seed,
        "manual_seed_all": seed,
        **random_state(),
    }


def random_state() -> dict[str, Any]:
    """Return functions for the same state, under the names that megatron uses."""
    return {
        "get_rng_state": lambda *_, **__: device.generator.get_state(),
        "set_rng_state": lambda new_state, *_, **__: device.generator.set_state(new_state),
    }


def memory_statistics() -> dict[str, Any]:
    """Return functions for the allocated memory, under CUDA's names."""
    return {
        "memory_allocated": lambda where=None: state.allocated,
        "max_memory_allocated": lambda where=None: state.peak,
        "memory_reserved": lambda where=None: state.allocated,
        "max_memory_reserved": lambda where=None: state.peak,
        "memory_stats": cpu_torch.memory_statistics()["memory_stats"],
        "reset_peak_memory_stats": lambda where=None: state.reset_peak(),
    }


def device_literals() -> dict[str, Any]:
    """Return factories for which "cuda" is the device; the host's memory is never pinned."""
    return {name: _with_device(getattr(torch, name)) for name in cpu_torch.FACTORIES}


REPLACEMENTS = (
    Replacement("torch", device_literals),
    Replacement("torch.cuda", the_device),
    Replacement("torch.cuda", streams),
    Replacement("torch.cuda", random_numbers),
    Replacement("torch.cuda.random", random_state),
    Replacement("torch.cuda", memory_statistics),
    Replacement("torch.cuda.nvtx", cpu_torch.profiler_ranges),
)


def _operators() -> Any:
    """Return torch_npu's fused attention, which a run of the device's own would find in that module."""
    true = NpuOperators()
    names = ("npu_fusion_attention", "npu_fusion_attention_grad")
    return types.SimpleNamespace(**{name: device.as_operator(getattr(true, name)) for name in names})


def _with_device(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **keywords: Any) -> torch.Tensor:
        where = keywords.get("device")
        if where is not None and torch.device(where).type == "cuda":
            keywords["device"] = device.DEVICE
        keywords.pop("pin_memory", None)
        return factory(*arguments, **keywords)

    return make


def _replace_methods() -> None:
    """Replace the methods by which megatron moves and sorts tensors."""
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if arguments or keywords or not device.is_there(tensor):
            return original(tensor, *arguments, **keywords)
        return _TYPE_NAMES.get(tensor.dtype, f"torch.cuda.{tensor.dtype}")

    answer = cpu_torch.answer_megatron
    answer(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor.to(device.DEVICE))
    answer(torch.nn.Module, "cuda", lambda module, *_, **__: module.to(device.DEVICE))
    answer(torch.Tensor, "type", type_name)
    answer(torch.Tensor, "pin_memory", lambda tensor, *_, **__: device.pin(tensor.clone()))
