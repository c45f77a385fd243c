"""The CPU as an accelerator: gloo between ranks, and a view of torch for megatron in which "cuda" means the host."""

import inspect
import os
import resource
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch

from megatron_rl.platforms import cpu_torch, host
from megatron_rl.platforms.cpu_torch import DEVICE, Event, Stream
from megatron_rl.platforms.megatron_patches import Patch, replace_import
from megatron_rl.platforms.platform import MemoryFigures, Platform

# Each of these fusions needs a kernel that runs on CUDA only, or torch.compile.
_UNSUPPORTED_FUSIONS = MappingProxyType(
    {
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "cross_entropy_loss_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
    }
)


class CpuPlatform(Platform):
    """Ranks on the host's cores."""

    name = "cpu"
    device_type = "cpu"
    is_host = True
    collective_backend = "gloo"
    weight_transports = ("shm",)

    @property
    def unsupported_fusions(self) -> Mapping[str, bool]:
        return _UNSUPPORTED_FUSIONS

    def patches(self) -> list[tuple[str, str]]:
        replacements = [(replacement.title, replacement.reason) for replacement in cpu_torch.REPLACEMENTS]
        shared = ("one device of gloo for all groups", inspect.cleandoc(host.share_gloo_device.__doc__ or ""))
        onednn = ("oneDNN's matrix products", inspect.cleandoc(host.multiply_with_onednn.__doc__ or ""))
        mkl = ("MKL's reproducible mode", inspect.cleandoc(host.choose_mkl_mode.__doc__ or ""))
        return [*replacements, *cpu_torch.list_tensor_methods(), shared, mkl, onednn, *super().patches()]

    def _prepare(self) -> None:
        # Without this variable, which has no effect here, megatron warns if tensor parallelism overlaps.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        host.share_gloo_device()
        host.choose_mkl_mode()
        host.multiply_with_onednn()
        cpu_torch.replace_tensor_methods()
        replace_import(cpu_torch.build_import_function())

    def _megatron_patches(self) -> tuple[Patch, ...]:
        return cpu_torch.PATCHES

    def set_device(self, local_rank: int) -> None:
        """Do nothing: every rank runs on the same host."""

    def place(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def device(self) -> torch.device:
        return DEVICE

    def synchronize(self) -> None:
        """Do nothing: an operation is done when its call returns."""

    def stream(self) -> Any:
        return Stream()

    def current_stream(self) -> Any:
        return Stream()

    def on(self, stream: Any) -> AbstractContextManager:
        return stream

    def host_copy(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values themselves: the host's memory is the device's."""
        return values

    def page_lock(self, mapped: torch.Tensor) -> str | None:
        """Do nothing: the host's memory is the device's."""
        return None

    def page_unlock(self, mapped: torch.Tensor) -> None:
        """Do nothing."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Any:
        return Event()

    def mark(self) -> Any:
        return time.monotonic()

    def seconds_between(self, first: Any, last: Any) -> float:
        return last - first

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def memory(self) -> MemoryFigures:
        """Measure anonymous resident memory, and the peak of all resident memory, which includes mapped files.

        The kernel does not keep a peak of anonymous memory alone; the reported peak is an upper bound of it.
        """
        figures = _status()
        return MemoryFigures(
            allocated=figures["RssAnon"],
            peak=figures["VmHWM"],
            total=os.sysconf("SC_PHYS_PAGES") * resource.getpagesize(),
        )

    def reset_peak_memory(self) -> None:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")


def _status() -> dict[str, int]:
    """Read the sizes in /proc/self/status, in bytes."""
    figures = {}
    with open("/proc/self/status", encoding="utf-8") as file:
        for line in file:
            key, _, value = line.partition(":")
            if value.endswith(" kB\n"):
                figures[key] = int(value.removesuffix(" kB\n")) * 1024
    return figures
