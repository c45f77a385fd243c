"""The files that a trainer publishes, mapped into an engine's memory.

The trainer writes to two folders in turn. After a new map a process must find the file page by page, which takes longer
than reading it. So the maps of both folders are kept for as long as the files exist. Where a device copies from them,
their pages stay locked as long: locking takes about as long as a copy from pages that are not.
"""

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.errors import InputError
from megatron_rl.platforms import Platform
from megatron_rl.shared.weights.arrival import is_in_memory
from megatron_rl.shared.weights.files import STORED_DTYPES, map_bytes
from megatron_rl.shared.weights.fingerprint import DTYPES

_log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]
Identity = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class _Folder:
    """The maps of a folder's files, and an open descriptor of each file.

    While the descriptor is open, no other file gets the same inode number.
    """

    files: tuple[Identity, ...]
    descriptors: tuple[int, ...]
    tensors: Tensors
    unlock: Callable[[], None]
    """A function that unlocks the pages which are locked."""

    def exists(self) -> bool:
        return all(os.fstat(descriptor).st_nlink for descriptor in self.descriptors)

    def close(self) -> None:
        self.unlock()
        self.tensors.clear()
        for descriptor in self.descriptors:
            os.close(descriptor)


class Maps:
    """The maps of the last two folders that were loaded from this host's memory."""

    def __init__(self, platform: Platform | None = None) -> None:
        """Keep maps; with the platform of a device that copies from them, lock their pages."""
        self._platform = platform
        self._is_refused = False
        self._folders: list[_Folder] = []

    def find(self, folder: Path) -> Tensors:
        """Return the tensors in a folder's files, as `map_file_tensors` does, but map no file a second time."""
        paths = _list_files(folder)
        self._keep([known for known in self._folders if known.exists()])
        files = tuple(_identify(path.stat()) for path in paths)
        for known in self._folders:
            if known.files == files:
                return known.tensors
        tensors = map_file_tensors(folder)
        if is_in_memory(folder):
            descriptors = tuple(os.open(path, os.O_RDONLY) for path in paths)
            identities = tuple(_identify(os.fstat(one)) for one in descriptors)
            new = _Folder(identities, descriptors, tensors, self._lock(tensors))
            self._keep([*self._folders[-1:], new])
        return tensors

    def _lock(self, tensors: Tensors) -> Callable[[], None]:
        """Lock the pages of all files; return a function that unlocks them."""
        platform = self._platform
        if platform is None:
            return lambda: None
        storages = {storage.data_ptr(): storage for storage in (one.untyped_storage() for one in tensors.values())}
        files = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
        refusals = [platform.page_lock(file) for file in files]
        locked = [file for file, refusal in zip(files, refusals, strict=True) if refusal is None]
        if (refused := next(filter(None, refusals), None)) and not self._is_refused:
            self._is_refused = True
            _log.warning(
                "weights are copied from pages that are not locked, which takes longer: %s (see the limit of locked "
                "memory, `ulimit -l`)", refused,
            )  # fmt: skip

        def unlock() -> None:
            for file in locked:
                platform.page_unlock(file)
            locked.clear()

        return unlock

    def _keep(self, folders: list[_Folder]) -> None:
        for known in self._folders:
            if known not in folders:
                known.close()
        self._folders = folders


def map_file_tensors(folder: Path) -> Tensors:
    """Return the tensors in a folder's files, in the files' order, without copying them."""
    tensors: Tensors = {}
    for path in _list_files(folder):
        tensors |= _map(path)
    return tensors


def _list_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise InputError(f"{folder} must hold a safetensors file")
    return paths


def _identify(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size


def _map(path: Path) -> Tensors:
    """Map a file's tensors."""
    tensors: Tensors = {}
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file, path.open("rb") as start:
            end = 8 + int.from_bytes(start.read(8), "little")
            whole = map_bytes(path, path.stat().st_size)
            # In this format, tensors follow each other without gaps.
            for name in file.offset_keys():
                piece = file.get_slice(name)
                dtype, shape = DTYPES[STORED_DTYPES[piece.get_dtype()]], piece.get_shape()
                begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
                tensors[name] = whole[begin:end].view(dtype).view(shape)
    except Exception as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    return tensors
