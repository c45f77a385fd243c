"""Micro-batches on their way to the device: all tensors of one in one buffer of pinned memory, and in one copy.

Invariants:

- a micro-batch takes one copy, on a queue of its own, so it does not wait for what the device computes;
- the host waits for no copy: the platform's allocator gives a buffer out again only once its copy has been made;
- whoever computes with the tensors calls `PendingCopy.wait` first, on the queue that computes. It keeps that queue from
  starting early, and the memory from being used again before that queue is done with it.
"""

import dataclasses
import itertools
from typing import Any, TypeVar

import torch

from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.shared_prompt.tables import keep_tables, list_tables, list_tensors, map_tensors
from megatron_rl.platforms import Platform

T = TypeVar("T")

# In bytes. Triton compiles a kernel again for a tensor that does not begin at a multiple of 16.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class PendingCopy:
    """A copy of a micro-batch to the device, which may not have arrived."""

    _platform: Platform | None = None
    """None if nothing was copied."""
    _event: Any = None
    _buffer: torch.Tensor | None = None

    def wait(self) -> None:
        """Have the current queue wait for the copy; the host does not wait."""
        if self._platform is None or self._buffer is None:
            return
        queue = self._platform.current_stream()
        queue.wait_event(self._event)
        self._buffer.record_stream(queue)


class DeviceCopier:
    """Copies micro-batches to a platform's device; made on the thread whose device it is."""

    def __init__(self, platform: Platform):
        self.device = platform.device()
        self._platform = platform
        self._queue = None if platform.is_host else platform.stream()

    def copy(self, micro_batch: T, layout: Layout) -> tuple[T, PendingCopy]:
        """Begin to copy a micro-batch and the tables of its layout, which keeps them; return it as it will be there.

        If the device is the host, nothing is copied.
        """
        if self._queue is None:
            return micro_batch, PendingCopy()
        tree = (micro_batch, list_tables(layout))
        tensors = list_tensors(tree)
        offsets = list(itertools.accumulate((_aligned(tensor.nbytes) for tensor in tensors), initial=0))
        # On the queue's device: another thread's own device may be another one.
        with self._platform.on(self._queue):
            pinned = self._platform.host_buffer(offsets[-1])
            for tensor, offset in zip(tensors, offsets, strict=False):
                _view(pinned, offset, tensor).copy_(tensor)
            buffer = torch.empty(offsets[-1], dtype=torch.uint8, device=self.device)
            buffer.copy_(pinned, non_blocking=True)
            event = self._platform.event()
            event.record(self._queue)
        views = (_view(buffer, offset, tensor) for tensor, offset in zip(tensors, offsets, strict=False))
        copied, tables = map_tensors(tree, lambda _: next(views))
        keep_tables(layout, self.device, tables)
        return copied, PendingCopy(self._platform, event, buffer)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a buffer of bytes at an offset, as a tensor of the same dtype and shape."""
    return buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
