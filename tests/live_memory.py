"""Count the bytes of live tensors, where operations make them."""

import gc
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """The memory of all live tensors that were made inside the context, in this thread.

    The memory that an operation takes for itself and gives back before it returns is not seen. The memory of tensors
    that existed before and are passed is not counted under another name either.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()
        storages = [tensor.untyped_storage() for tensor in before]
        self._before = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]

    def settled(self) -> int:
        """Return the bytes after other threads have released theirs: gloo's keep a collective's for a moment."""
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
