"""Checkpoints in folders: their files, their tensors, and one that is written while weights pass by."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.errors import InputError

if TYPE_CHECKING:
    import torch


def list_safetensors(folder: Path) -> list[Path]:
    """Return the safetensors that a folder's index names, or all; raise InputError if one is missing."""
    files = sorted(folder.glob("*.safetensors"))
    if (index := folder / "model.safetensors.index.json").exists():
        files = [folder / name for name in sorted({*json.loads(index.read_text())["weight_map"].values()})]
    if not files:
        raise InputError(f"{folder} has no safetensors on the engine's host")
    parts = re.search(r"-of-(\d+)\.safetensors$", files[-1].name)
    missing = [file.name for file in files if not file.exists()]
    if missing or (parts and len(files) < int(parts[1])):
        raise InputError(f"{folder} lacks {', '.join(missing) or 'some of its files'}: wait until all are written")
    return files


def read_folder(folder: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield the tensors of a folder's safetensors."""
    from safetensors import safe_open

    for path in list_safetensors(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def make_shared_folder(place: str | None) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that the engines of this host can read: in memory, if no other place is named."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=place or (memory if memory.is_dir() else None))


def save(folder: Path, number: int, name: str, tensor: "torch.Tensor") -> None:
    """Save a tensor in a file of that number."""
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous()}, folder / f"{number}.safetensors")
