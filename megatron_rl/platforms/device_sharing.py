"""A device's memory that several processes of one host use, without a copy.

A handle is plain data, so it can be written to a file. A process that opens it uses the very memory of the process that
shared it: nothing orders their reads and writes, which both must agree on.
"""

import dataclasses
from typing import Protocol

import torch

from megatron_rl.errors import MegatronRLError


class CannotShare(MegatronRLError):
    """Memory of a device cannot be shared, or shared memory cannot be opened."""


@dataclasses.dataclass(frozen=True)
class MemoryHandle:
    """Memory that another process can open; every field but the device is as the device's driver and torch give it."""

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
