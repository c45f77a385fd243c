"""How many bytes of tensors there are, counted where operations make them."""

import gc
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """The memory of all tensors that were made inside, in this thread, and are still there.

    What an operation takes for itself and gives back before it returns is not seen, and the memory of tensors that were
    there before, and are passed, is not counted under another name either.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()
        storages = [tensor.untyped_storage() for tensor in before]
        self._before = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]

    def settled(self) -> int:
        """What there is once others have let go of what they keep for a moment: gloo's threads, of a collective's."""
        gc.collect()
        lowest = self.now
        for _ in range(50):
            time.sleep(0.01)
            lowest = min(lowest, self.now)
        return lowest

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._see(value.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        if any(start <= storage.data_ptr() < end for start, end in self._before):
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, identity: int, num_bytes: int) -> None:
        self._known.discard(identity)
        self.now -= num_bytes
