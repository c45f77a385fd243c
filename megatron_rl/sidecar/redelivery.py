"""Brings the current version to a host that joins or returns between two publishes, from a host that has all of it.

The trainer is busy then. If all of the version lies in the folder that rank 0 has published to, and this is the
service's host, the service sends it as a rank would (docs/hosts.md). Otherwise it has the agent of a host of engines
do so, from the folder in which the version has arrived. A version that the trainer begins on the host takes its place.
Engines prove what they load in the usual way.

This module does not import torch: it reads the headers of the files itself.
"""

import json
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.shared.weights.delivery.channel import Shipment
from megatron_rl.shared.weights.delivery.control import Control
from megatron_rl.shared.weights.delivery.mapped import MappedFiles
from megatron_rl.shared.weights.delivery.messages import Contents, File, Hello, Portion, Strip, Target
from megatron_rl.shared.weights.delivery.sender import HostSender, Supply
from megatron_rl.shared.weights.folders import COUNTS_FILE, DIGESTS_FILE, Arrival, is_being_written
from megatron_rl.shared.weights.mapping import TensorSpec

_log = logging.getLogger(__name__)

_SENDER = "a host that has the version"
_NUM_STREAMS = 2
_PATIENCE_SECONDS = 20.0
_LONGEST_SECONDS = 600.0
_LENGTH_BYTES = 8
_PORTION_BYTES = 1 << 24


def redeliver(weights: Weights, target: Target, key: bytes, lease: int) -> bool:
    """Begin to send a version to a host, from threads of its own; return whether it arrives there now.

    `lease` is the lease of the trainer that has published the version.
    """
    folder = None if weights.is_streamed else Path(weights.folder)
    contents = None if folder is None else describe_whole(folder)
    if folder is None or contents is None:
        return False
    hello = Hello("control", weights.run, lease, weights.version, weights.fingerprint, _SENDER)
    mapped, digests = MappedFiles(folder, contents.files), (folder / DIGESTS_FILE).read_bytes()
    shipment = Shipment(hello, key, contents, _NUM_STREAMS, _PATIENCE_SECONDS)
    control = Control([target], shipment, digests)
    control.await_begun()
    if not control.list_open():
        _end(control, hello)
        return False
    supply = Supply(contents)
    supply.add(supply.numbers)
    sender = HostSender(target, shipment, mapped, supply)
    threading.Thread(target=_finish, args=(control, sender, hello), daemon=True).start()
    return True


def _finish(control: Control, sender: HostSender, hello: Hello) -> None:
    if not control.await_round(_LONGEST_SECONDS) or control.list_open():
        control.give_up(sender.host, "it did not receive all in time")
    sender.stop("the delivery is over")
    _end(control, hello)


def _end(control: Control, hello: Hello) -> None:
    for name, reason in control.list_lost().items():
        _log.warning("version %d was not sent to %s: %s", hello.version, name, reason)
    control.close()


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
