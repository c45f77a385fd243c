"""A version that lies whole in a folder of this host's memory, as one sender delivers it.

This module does not import torch: it reads the headers of the files itself.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.shared.weights.arrival import COUNTS_FILE, Arrival, is_being_written
from megatron_rl.shared.weights.delivery.messages import Contents, File, Portion, Strip
from megatron_rl.shared.weights.mapping import TensorSpec

_LENGTH_BYTES = 8
_PORTION_BYTES = 1 << 24


def describe_whole(folder: Path, most_bytes: int = _PORTION_BYTES) -> Contents | None:
    """Describe the version in a folder; return None if not all of it lies there."""
    # Without counts nothing tells the files of one trainer host from those of all.
    if not (folder / COUNTS_FILE).exists() or is_being_written(folder):
        return None
    paths = sorted(folder.glob("*.safetensors"))
    headers = [_read_header(path) for path in paths]
    entries = [_list_tensors(header) for header in headers]
    specs = [TensorSpec(name, tuple(entry["shape"]), "") for of_file in entries for name, entry in of_file.items()]
    with Arrival(folder, specs) as arrival:
        if not arrival.is_coming():
            return None
    tensors = sorted(spec.name for spec in specs)
    numbers = {name: number for number, name in enumerate(tensors)}
    files = tuple(
        File(path.name, path.stat().st_size, header) for path, header in zip(paths, headers, strict=True)
    )  # fmt: skip
    portions = tuple(
        Portion(file, 0, (Strip(first_byte, 1, num_bytes, num_bytes),), ((numbers[name], num_elements),))
        for file, of_file in enumerate(entries)
        for name, entry in of_file.items()
        for first_byte, num_bytes, num_elements in _divide(entry, len(headers[file]), most_bytes)
    )
    return Contents(files, tuple(tensors), 1, portions)


def _read_header(path: Path) -> bytes:
    """Read a file's length of its header, and the header."""
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        return length + file.read(int.from_bytes(length, "little"))


def _list_tensors(header: bytes) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = json.loads(header[_LENGTH_BYTES:])
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}


def _divide(entry: dict[str, Any], header_bytes: int, most_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, bytes and elements of each part of a tensor."""
    start, end = entry["data_offsets"]
    num_elements = math.prod(entry["shape"])
    if not num_elements:
        return
    element = (end - start) // num_elements
    step = most_bytes // element * element
    for first in range(start, end, step):
        num_bytes = min(step, end - first)
        yield header_bytes + first, num_bytes, num_bytes // element
