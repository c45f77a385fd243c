"""CUDA IPC: memory of one GPU in several processes of a host, by torch's own handles."""

from typing import Any

import torch

from megatron_rl.platforms.device_sharing import CannotShare, MemoryHandle

_NO_EVENT = b""


class CudaSharing:
    """Satisfies `megatron_rl.platforms.device_sharing.DeviceSharing`.

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
