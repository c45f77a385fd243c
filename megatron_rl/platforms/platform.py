"""The interface of a platform: the few operations that the package calls on a kind of device."""

import abc
import dataclasses
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch

from megatron_rl import versions
from megatron_rl.errors import MegatronRLError, PlatformError
from megatron_rl.platforms.megatron_patches import FIXES, Patch, install_patches

# The platform that this process is set up for; a process can be set up for only one.
_installed: "Platform | None" = None

# Beginnings of warnings that megatron gives at every import: about missing optional packages (`megatron-rl doctor`
# reports these), about its own defaults, and about deprecated functions that it still uses.
KNOWN_WARNINGS = (
    ".*(Apex|Transformer Engine).*not installed.*",
    "full scope is deprecated.*",
    "Please use DTensor instead.*",
    "absl.logging is not installed.*",
    "`load_state_dict` is deprecated.*",
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
    "The following imports from `dynamic_context.py` will be removed",
    "The 'megatron.core.transformer.custom_layers.transformer_engine'",
    "If you are using transformer_engine as the transformer implementation, the core_attn is from",
    "MLP requires ffn_hidden_size, but it was not provided",
    "MimoModelConfig is experimental",
    "The argument order of load has been changed",
    "Warning. tp_group is None, using default tp group",
    "torch.distributed is disabled, unavailable or uninitialized",
)


class CannotShare(MegatronRLError):
    """Memory of a device cannot be shared, or shared memory cannot be opened."""


@dataclasses.dataclass(frozen=True)
class MemoryHandle:
    """Memory of a device that another process of the host can open, without a copy; plain data, so it can be written.

    Nothing orders reads and writes of the two processes, which must agree on them. Every field but the device is as the
    device's driver and torch give it.
    """

    device: str
    """The device's unique identifier, which is the same in all processes."""
    memory: bytes
    num_bytes: int
    first_byte: int
    """The place of the bytes in the allocation that `memory` stands for."""
    counter: bytes = b""
    counter_place: int = 0


class DeviceSharing(Protocol):
    """Shares memory of this process's device, and opens what others share."""

    def find_obstacles(self) -> list[str]:
        """Return why memory of this process cannot be shared; nothing if it can."""
        ...

    def share(self, storage: torch.UntypedStorage) -> MemoryHandle:
        """Share a storage for as long as it exists; raise CannotShare with the reason if that is refused."""
        ...

    def open(self, handle: MemoryHandle) -> torch.Tensor:
        """Return the shared bytes as a tensor on this process's device; raise CannotShare if that is refused.

        The memory is released with the tensor's storage.
        """
        ...


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """Bytes of the memory that holds this process's tensors."""

    allocated: int
    peak: int
    total: int


class Platform(abc.ABC):
    """The operations on a kind of device that the rest of the package calls, and no others."""

    name: ClassVar[str]
    # The type of this platform's torch.device.
    device_type: ClassVar[str]
    # Whether the device's memory is the host's.
    is_host: ClassVar[bool] = False
    collective_backend: ClassVar[str]
    # The ways in which weights can reach an engine, the simplest first.
    weight_transports: ClassVar[tuple[str, ...]]
    # Modules of a layer that take little time to compute again, by Megatron's names.
    cheap_modules: ClassVar[tuple[str, ...]] = ("layernorm",)

    def install(self) -> None:
        """Prepare this process for megatron, before its first import; a second call does nothing."""
        global _installed
        if _installed is self:
            return
        if _installed is not None:
            raise PlatformError(
                f"this process is already set up for the platform {_installed.name!r} and cannot change to "
                f"{self.name!r}; start another process"
            )
        if any(name == "megatron" or name.startswith("megatron.") for name in sys.modules):
            raise PlatformError(
                f"megatron was imported before the platform {self.name!r} was installed; call "
                f"megatron_rl.platforms.select({self.name!r}).install() before the first import of megatron"
            )
        versions.check()
        for message in KNOWN_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        self._prepare()
        install_patches([*FIXES, *self._megatron_patches()])
        self._after_install()
        _installed = self

    def patches(self) -> list[tuple[str, str]]:
        """Return the name of each change that `install` makes, with its reason."""
        return [(patch.name, patch.reason) for patch in (*FIXES, *self._megatron_patches())]

    def _prepare(self) -> None:
        """Prepare the process before megatron's import is hooked."""

    def _megatron_patches(self) -> tuple[Patch, ...]:
        return ()

    def _after_install(self) -> None:
        """Finish the installation after megatron's import is hooked."""

    @property
    @abc.abstractmethod
    def unsupported_fusions(self) -> Mapping[str, bool]:
        """Fields of megatron's TransformerConfig whose kernels are missing here, each with the value to set."""

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Bind this process to its device."""

    @abc.abstractmethod
    def place(self, num_threads: int) -> None:
        """Place this process's threads where they compute best: `num_threads` on a CPU, else cores near its device."""

    @abc.abstractmethod
    def device(self) -> torch.device:
        """Return the device that this process is bound to."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all queued work."""

    @abc.abstractmethod
    def stream(self) -> Any:
        """Make a new queue of work beside the current queue."""

    @abc.abstractmethod
    def current_stream(self) -> Any:
        """Return the queue that operations go to."""

    @abc.abstractmethod
    def on(self, stream: Any) -> AbstractContextManager:
        """Return a context in which operations go to that queue."""

    @abc.abstractmethod
    def host_copy(self, values: torch.Tensor) -> torch.Tensor:
        """Copy values into the host's memory, from which the device can copy while it computes."""

    @abc.abstractmethod
    def page_lock(self, mapped: torch.Tensor) -> str | None:
        """Let the device copy to and from memory of the host that is in use already; if refused, return the reason."""

    @abc.abstractmethod
    def page_unlock(self, mapped: torch.Tensor) -> None:
        """End what `page_lock` began, which must be before the memory is unmapped."""

    @abc.abstractmethod
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate bytes of the host's memory to and from which the device can copy while it computes.

        Memory that is given up is used again only after the copies to and from it.
        """

    def release_memory(self) -> None:
        """Give memory of the device that no tensor has back to its other processes."""

    def device_sharing(self) -> DeviceSharing | None:
        """Return how processes share the device's memory; None if they cannot."""
        return None

    @abc.abstractmethod
    def event(self) -> Any:
        """Make a new marker that can be recorded in a queue and waited for."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Mark this moment in the current queue, for `seconds_between`. Nothing waits."""

    @abc.abstractmethod
    def seconds_between(self, first: Any, last: Any) -> float:
        """Return the seconds from one mark to a later one; wait until the device has passed both."""

    @abc.abstractmethod
    def rng_state(self) -> torch.Tensor:
        """Return the state of the device's random numbers."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Continue the device's random numbers from a state of `rng_state`."""

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's random numbers."""

    def choose_fixed_order(self) -> None:
        """Make operations give the same bits each time, if the platform has a choice; call it before the first one."""

    @abc.abstractmethod
    def memory(self) -> MemoryFigures:
        """Measure the memory that this process uses now, its peak since `reset_peak_memory`, and the total."""

    def smallest_device(self, num_devices: int) -> int | None:
        """Return the bytes of the smallest of the first devices; None if ranks do not have devices of their own."""
        return None

    def device_name(self) -> str | None:
        """Return the name of the first device, by which measured times are found; None if there is none."""
        return None

    @abc.abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset `MemoryFigures.peak`."""


class Accelerator(Platform):
    """A kind of device whose operations torch has in a namespace, such as `torch.cuda`."""

    noun: ClassVar[str]

    @property
    @abc.abstractmethod
    def namespace(self) -> Any:
        """The namespace; torch_npu adds one like CUDA's."""

    def set_device(self, local_rank: int) -> None:
        count = self.namespace.device_count()
        if local_rank >= count:
            raise PlatformError(
                f"local rank {local_rank} has no {self.noun}, {count} are visible: start at most {count} ranks on this "
                "host"
            )
        self.namespace.set_device(local_rank)

    def device(self) -> torch.device:
        return torch.device(self.device_type, self.namespace.current_device())

    def synchronize(self) -> None:
        self.namespace.synchronize()

    def stream(self) -> Any:
        return self.namespace.Stream()

    def current_stream(self) -> Any:
        return self.namespace.current_stream()

    def on(self, stream: Any) -> AbstractContextManager:
        return self.namespace.stream(stream)

    def host_copy(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values, device="cpu", pin_memory=True).copy_(values)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def release_memory(self) -> None:
        self.namespace.empty_cache()

    def event(self) -> Any:
        return self.namespace.Event()

    def mark(self) -> Any:
        event = self.namespace.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first: Any, last: Any) -> float:
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def rng_state(self) -> torch.Tensor:
        return self.namespace.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.namespace.set_rng_state(state)

    def seed(self, seed: int) -> None:
        self.namespace.manual_seed(seed)

    def memory(self) -> MemoryFigures:
        return MemoryFigures(
            allocated=self.namespace.memory_allocated(),
            peak=self.namespace.max_memory_allocated(),
            total=self.namespace.get_device_properties(self.namespace.current_device()).total_memory,
        )

    def smallest_device(self, num_devices: int) -> int | None:
        numbers = range(min(num_devices, self.namespace.device_count()))
        return min(self.namespace.get_device_properties(number).total_memory for number in numbers)

    def reset_peak_memory(self) -> None:
        self.namespace.reset_peak_memory_stats()


def sum_in_fixed_order(variables: Mapping[str, str]) -> None:
    """Make torch choose kernels that sum in a fixed order, or raise; set variables that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # Otherwise torch also fills all new memory, which helps to find reads of memory that was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def is_installed(name: str) -> bool:
    """Return whether this process is set up for the platform of that name."""
    return _installed is not None and _installed.name == name
