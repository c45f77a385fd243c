"""Pages of the host that a device reads by itself: mapped files that are pinned for as long as they are mapped.

A copy from pages that are not pinned passes through a buffer of the driver, at a fraction of the speed, and the host
waits for it. Pinning takes about as long as such a copy, so only maps that are used again are worth it.
"""

import contextlib
import logging
from typing import Protocol

import torch

_log = logging.getLogger(__name__)


class Pages(Protocol):
    """Pins pages of this process."""

    def pin(self, address: int, num_bytes: int) -> bool:
        """Pin pages, and return whether they are pinned; if not, copies from them are slower."""
        ...

    def release(self, address: int) -> None:
        """Release pages that are pinned, before they are unmapped."""
        ...


class CudaPages:
    """Satisfies `Pages` with the CUDA runtime."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_refused = False

    def pin(self, address: int, num_bytes: int) -> bool:
        error = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
        if error.value == 0:
            return True
        if not self._is_refused:
            self._is_refused = True
            _log.warning(
                "weights are copied from pages that are not pinned, which is slower: cudaHostRegister of %d bytes "
                "gave %s (see `ulimit -l`, and the container's limit of locked memory)", num_bytes, error,
            )  # fmt: skip
        self._forget_error()
        return False

    def release(self, address: int) -> None:
        if torch.cuda.cudart().cudaHostUnregister(address).value != 0:
            self._forget_error()

    def _forget_error(self) -> None:
        """Take the error back: CUDA would report it at the next launch, which has nothing to do with it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros((), device=self._device)
