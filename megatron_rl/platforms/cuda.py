"""NVIDIA's GPUs: megatron is written for them, so neither torch nor megatron needs a change for them."""

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.errors import PlatformError
from megatron_rl.platforms.host import bind_to_cores, read_core_list
from megatron_rl.platforms.platform import Accelerator, CannotShare, DeviceSharing, MemoryHandle, sum_in_fixed_order
from megatron_rl.versions import find_engine_refusal

_PCI_DEVICES = Path("/sys/bus/pci/devices")
# Fields of TransformerConfig, each with the modules that have a kernel for it; any one of them is enough.
_KERNELS = {
    "apply_rope_fusion": ("transformer_engine",),
    "masked_softmax_fusion": ("scaled_masked_softmax_cuda",),
    "persist_layer_norm": ("apex.contrib.layer_norm.layer_norm",),
}


# With these, cuBLAS, NCCL and TransformerEngine sum in a fixed order; Megatron's own training wants the last two.
_FIXED_ORDER = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}  # fmt: skip


class CudaPlatform(Accelerator):
    """One rank a GPU."""

    noun = "GPU"
    name = "cuda"
    device_type = "cuda"
    collective_backend = "nccl"
    weight_transports = ("shm", "nccl")

    @property
    def namespace(self) -> Any:
        return torch.cuda

    @property
    def unsupported_fusions(self) -> Mapping[str, bool]:
        return {field: False for field, modules in _KERNELS.items() if not any(map(_importable, modules))}

    def _prepare(self) -> None:
        if not torch.cuda.is_available():
            raise PlatformError(
                f"torch {torch.__version__} finds no CUDA device; install a CUDA build of torch and the driver, make a "
                "device visible (CUDA_VISIBLE_DEVICES), or write --platform cpu"
            )
        # To overlap a collective with a matrix product, megatron's tensor parallelism queues the collective first. This
        # needs a single hardware queue. The variable is read when the context is made; a user's value is kept.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

    def place(self, num_threads: int) -> None:
        """Bind to the cores of the GPU's own NUMA node, unless this process is already bound."""
        found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        if not hasattr(found, "pci_bus_id"):
            # This torch does not know the GPU's address: that costs only speed.
            return
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        bind_to_cores(read_core_list(_PCI_DEVICES / address / "local_cpulist"))

    def page_lock(self, mapped: torch.Tensor) -> str | None:
        runtime: Any = torch.cuda.cudart()
        code = runtime.cudaHostRegister(mapped.data_ptr(), mapped.nbytes, 0)
        if code == runtime.cudaError.success:
            return None
        # CUDA reports a refusal again to the next kernel's launch, unless it has been asked for.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.device())
        return f"cudaHostRegister: {runtime.cudaGetErrorString(code)}"

    def page_unlock(self, mapped: torch.Tensor) -> None:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(mapped.data_ptr()))

    def device_sharing(self) -> DeviceSharing | None:
        return CudaSharing()

    def choose_fixed_order(self) -> None:
        sum_in_fixed_order(_FIXED_ORDER)

    def device_name(self) -> str | None:
        return torch.cuda.get_device_name(0) if torch.cuda.device_count() else None


def _importable(name: str) -> bool:
    if name == "transformer_engine":
        return find_engine_refusal() is None
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        # A parent package is missing or does not load.
        return False


_NO_EVENT = b""


class CudaSharing:
    """Satisfies `megatron_rl.platforms.platform.DeviceSharing`.

    A process opens memory on its own device even if the memory lies on another one, which may be hidden from it
    (CUDA_VISIBLE_DEVICES). Addresses are unique on a host, so the device finds the memory by itself.
    """

    def find_obstacles(self) -> list[str]:
        found = []
        if _is_instance():
            found.append("GPU is divided into instances (MIG)")
        # These segments have no handle that every process of the host can open.
        if any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
            found.append("memory has expandable segments (PYTORCH_CUDA_ALLOC_CONF)")
        return found

    def share(self, storage: torch.UntypedStorage) -> MemoryHandle:
        unnamed: Any = storage
        try:
            shared = unnamed._share_cuda_()
        except RuntimeError as error:
            raise CannotShare(_first_line(error)) from None
        # The last two name an event for the reader's queue. An offer is read only once its weights are written.
        _, memory, num_bytes, first_byte, counter, counter_place, _, _ = shared
        return MemoryHandle(
            device=_identify(storage.device.index),
            memory=memory,
            num_bytes=num_bytes,
            first_byte=first_byte,
            counter=counter,
            counter_place=counter_place,
        )

    def open(self, handle: MemoryHandle) -> torch.Tensor:
        if _is_instance():
            raise CannotShare("the engine's GPU is divided into instances (MIG)")
        own = torch.cuda.current_device()
        for device in range(torch.cuda.device_count()):
            is_owner = _identify(device) == handle.device
            if is_owner and device != own and not torch.cuda.can_device_access_peer(own, device):
                raise CannotShare(f"GPU {_identify(own)} has no peer access to {handle.device}")
        unnamed: Any = torch.UntypedStorage
        try:
            storage = unnamed._new_shared_cuda(
                own,
                handle.memory,
                handle.num_bytes,
                handle.first_byte,
                handle.counter,
                handle.counter_place,
                _NO_EVENT,
                False,
            )
        except RuntimeError as error:
            raise CannotShare(f"memory of GPU {handle.device} cannot be opened: {_first_line(error)}") from None
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", own)).set_(storage)


def _is_instance() -> bool:
    """Check whether this process's device is a part of a GPU."""
    return " MIG " in f"{torch.cuda.get_device_name()} "


def _identify(device: int) -> str:
    found: Any = torch.cuda.get_device_properties(device)
    return str(found.uuid)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
