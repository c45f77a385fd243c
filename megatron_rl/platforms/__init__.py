"""The machine: which kind of device the ranks run on, and the few operations the rest of the package calls on it.

This is the one place that changes torch or megatron, and the only one beside ops/ that knows CUDA and NPU by name.
"""

import abc
import dataclasses
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from megatron_rl import versions
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.platforms.megatron_patches import FIXES, Patch, install_patches

# The platform that this process is set up for; a process can be set up for one only.
_installed: "Platform | None" = None

# Beginnings of warnings that megatron gives at every import: of missing optional packages (`megatron-rl doctor` reports
# these), of its own defaults, and of deprecated functions that it still uses.
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


@dataclasses.dataclass(frozen=True)
class MemoryFigures:
    """Bytes of the memory that this process's tensors live in."""

    allocated: int
    peak: int
    total: int


class Platform(abc.ABC):
    """The operations on a kind of device that the rest of the package calls, and no others."""

    name: ClassVar[str]
    # The type of a torch.device here.
    device_type: ClassVar[str]
    collective_backend: ClassVar[str]
    # The ways in which weights can reach an engine, the one that needs least first.
    weight_transports: ClassVar[tuple[str, ...]]

    def install(self) -> None:
        """Make megatron usable here, before its first import; a second call does nothing."""
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
        """What `install` changes, and why."""
        return [(patch.name, patch.reason) for patch in (*FIXES, *self._megatron_patches())]

    def _prepare(self) -> None:
        """Runs before megatron's import is hooked."""

    def _megatron_patches(self) -> tuple[Patch, ...]:
        return ()

    def _after_install(self) -> None:
        """Runs after megatron's import is hooked."""

    @property
    @abc.abstractmethod
    def unsupported_fusions(self) -> Mapping[str, bool]:
        """Fields of megatron's TransformerConfig that need a kernel which is missing here, and the values to set."""

    @abc.abstractmethod
    def set_device(self, local_rank: int) -> None:
        """Bind this process to its device."""

    @abc.abstractmethod
    def place(self, num_threads: int) -> None:
        """Run this process's threads where they compute best: `num_threads` of them on a CPU, else near its device."""

    @abc.abstractmethod
    def device(self) -> torch.device:
        """The device this process is bound to."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was queued on the device is done."""

    @abc.abstractmethod
    def stream(self) -> Any:
        """A new queue of work beside the current one."""

    @abc.abstractmethod
    def current_stream(self) -> Any:
        """The queue that operations go to."""

    @abc.abstractmethod
    def on(self, stream: Any) -> AbstractContextManager:
        """Return a context in which operations go to that queue."""

    @abc.abstractmethod
    def host_copy(self, values: torch.Tensor) -> torch.Tensor:
        """A copy in the host's memory, from which the device copies while it computes."""

    @abc.abstractmethod
    def event(self) -> Any:
        """A new marker that can be recorded in a queue and waited for."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Mark this moment in the current queue, for `seconds_between`. Nothing waits."""

    @abc.abstractmethod
    def seconds_between(self, first: Any, last: Any) -> float:
        """The seconds from one mark to a later one; waits until the device has passed both."""

    @abc.abstractmethod
    def rng_state(self) -> torch.Tensor:
        """The state of the device's random numbers."""

    @abc.abstractmethod
    def set_rng_state(self, state: torch.Tensor) -> None:
        """Continue the device's random numbers from a state of `rng_state`."""

    @abc.abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the device's random numbers."""

    def choose_fixed_order(self) -> None:
        """Have every operation give the same bits each time, where that is a choice; before the first of them."""

    @abc.abstractmethod
    def memory(self) -> MemoryFigures:
        """The memory that this process uses now, its peak since `reset_peak_memory`, and the total."""

    @abc.abstractmethod
    def reset_peak_memory(self) -> None:
        """Reset `MemoryFigures.peak`."""


def sum_in_fixed_order(variables: Mapping[str, str]) -> None:
    """Have torch choose kernels that do, and raise where it has none; set variables that nobody has set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # It would also fill all new memory, which is for finding reads of what was never written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


NAMES = ("cpu", "cuda", "npu")


def is_installed(name: str) -> bool:
    """Whether this process is set up for the platform of that name."""
    return _installed is not None and _installed.name == name


def install_for_reading(platform: Platform) -> str | None:
    """Make megatron usable for code that computes nothing; if the platform is missing, use the CPU's and return why."""
    try:
        platform.install()
    except PlatformError as error:
        if platform.name == "cpu":
            raise
        select("cpu").install()
        return str(error)
    return None


def select(name: str | None = None) -> Platform:
    """Return the platform of that name; without a name, or with "auto", the best that this machine has."""
    if name is None or name == "auto":
        name = _detect()
    if name not in NAMES:
        raise UsageError(f"unknown platform {name!r}: write one of auto, {', '.join(NAMES)}")
    return _platform(name)


@functools.cache
def _platform(name: str) -> Platform:
    # Imported here: each needs packages that the others do not.
    if name == "npu":
        from megatron_rl.platforms.npu import NpuPlatform

        return NpuPlatform()
    if name == "cuda":
        from megatron_rl.platforms.cuda import CudaPlatform

        return CudaPlatform()
    from megatron_rl.platforms.cpu import CpuPlatform

    return CpuPlatform()


def _detect() -> str:
    if importlib.util.find_spec("torch_npu") is not None:
        from megatron_rl.platforms.npu import has_device

        if has_device():
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"
