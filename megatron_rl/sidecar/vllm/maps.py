"""The files that a trainer publishes, mapped into an engine's memory.

The trainer writes to two folders in turn. After a new map a process must find the file page by page, which takes longer
than reading it. So the maps of both folders are kept for as long as the files exist. Where a device copies from them,
their pages stay pinned as long.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.arrival import is_in_memory
from megatron_rl.shared.weights.files import STORED_DTYPES, map_bytes
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.sidecar.vllm.pages import Pages

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
    release: Callable[[], None]
    """A function that releases the pages which are pinned."""

    def exists(self) -> bool:
        return all(os.fstat(descriptor).st_nlink for descriptor in self.descriptors)

    def close(self) -> None:
        self.release()
        self.tensors.clear()
        for descriptor in self.descriptors:
            os.close(descriptor)


class Maps:
    """The maps of the last two folders that were loaded from this host's memory."""

    def __init__(self, pages: Pages | None = None) -> None:
        """Keep maps; with `pages`, pin their pages."""
        self._pages = pages
        self._folders: list[_Folder] = []

    def find(self, folder: Path) -> Tensors:
        """Return the tensors in a folder's files, as `map_tensors` does, but map no file a second time."""
        paths = _list_files(folder)
        self._keep([known for known in self._folders if known.exists()])
        files = tuple(_identify(path.stat()) for path in paths)
        for known in self._folders:
            if known.files == files:
                return known.tensors
        tensors = map_tensors(folder)
        if is_in_memory(folder):
            descriptors = tuple(os.open(path, os.O_RDONLY) for path in paths)
            identities = tuple(_identify(os.fstat(one)) for one in descriptors)
            new = _Folder(identities, descriptors, tensors, self._pin(tensors))
            self._keep([*self._folders[-1:], new])
        return tensors

    def _pin(self, tensors: Tensors) -> Callable[[], None]:
        """Pin the pages of all files; return a function that releases them."""
        if (pages := self._pages) is None:
            return lambda: None
        files = {
            storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors.values())
        }
        pinned = [address for address, num_bytes in files.items() if pages.pin(address, num_bytes)]

        def release() -> None:
            for address in pinned:
                pages.release(address)

        return release

    def _keep(self, folders: list[_Folder]) -> None:
        for known in self._folders:
            if known not in folders:
                known.close()
        self._folders = folders


def map_tensors(folder: Path) -> Tensors:
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
