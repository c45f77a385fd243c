"""Parts that tests of publishes share: folders in memory, readers of files that arrive, and a trainer's ranks.

The ranks write what they own to files, and send it to receivers.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.delivery.channel import Shipment
from megatron_rl.shared.weights.delivery.control import Control
from megatron_rl.shared.weights.delivery.mapped import MappedFiles
from megatron_rl.shared.weights.delivery.messages import Contents, Hello, Target
from megatron_rl.shared.weights.delivery.sender import HostSender, Supply
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.folders import Arrival
from megatron_rl.shared.weights.mapping import Mapping, TensorSpec
from megatron_rl.shared.weights.parcels import describe_contents, list_portions
from megatron_rl.shared.weights.shards import Digests, Shard, export
from megatron_rl.sidecar.vllm.received import map_file_tensors
from megatron_rl.types import Architecture

TOKEN = "the token of this run"


def give_memory() -> Iterator[Path]:
    """Yield a folder in the host's memory; a fixture of several tests."""
    with tempfile.TemporaryDirectory(prefix="megatron-rl-test-", dir="/dev/shm") as folder:
        yield Path(folder)


class Service:
    """A rollout service that is told of versions, and gets no probe."""

    def probed(self, answer: Any) -> None:
        raise AssertionError("no probe was given")


def load_arriving(folder: Path, fingerprint: str, base: str = "", sleep: Callable[[float], None] = time.sleep) -> bool:
    """Read each tensor once it has arrived, as an engine does, in another order than they are written in.

    Return whether all came; they must be those announced.
    """
    tensors, digests = map_file_tensors(folder), files.read_digests(folder)
    specs = [TensorSpec(name, tuple(tensor.shape), "float32") for name, tensor in tensors.items()]
    assert compute_fingerprint(specs, digests, base) == fingerprint
    with Arrival(folder, specs, sleep) as arrival:
        for name, tensor in reversed(tensors.items()):
            if not arrival.wait_for(name):
                return False
            assert digest(tensor).tolist() == digests[name]
    return True


def change(weights: Any) -> None:
    """Change all weights, as an update does."""
    with torch.no_grad():
        for shard in weights.shards:
            shard.parameter.mul_(1.5)


class Ranks:
    """All ranks that own a part of a model, with files in a folder."""

    def __init__(self, folder: Path, architecture: Architecture, ranks: Sequence[Sequence[Shard]], most_bytes: int):
        self.folder = folder
        self.ranks = ranks
        self.specs = Mapping(architecture).manifest()
        self.plan = files.FilePlan(self.specs)
        portions = [
            portion
            for writer, shards in enumerate(ranks)
            for portion in list_portions(shards, self.plan, writer, most_bytes)
        ]
        self.contents: Contents = describe_contents(self.plan, len(ranks), portions)
        sums = Digests(self.specs)
        for shards in ranks:
            sums.add_shards(shards)
        self.digests = sums.combine()
        self.fingerprint = compute_fingerprint(self.specs, self.digests)
        files.create(folder, self.plan, private=True)

    @property
    def num_bytes(self) -> int:
        return sum(portion.num_bytes for portion in self.contents.portions)

    def hello(self, version: int, lease: int = 1, sender: str = "rank 0") -> Hello:
        return Hello("control", "run", lease, version, self.fingerprint, sender)

    def begin(self, targets: Sequence[Target], version: int, patience: float = 20.0, streams: int = 2) -> Control:
        shipment = Shipment(self.hello(version), TOKEN.encode(), self.contents, streams, patience)
        return Control(targets, shipment, json.dumps(self.digests).encode())

    def send(
        self, targets: Sequence[Target], version: int, patience: float = 20.0, streams: int = 2, lease: int = 1
    ) -> list[tuple[Supply, HostSender]]:
        """Start the senders of all ranks; nothing is sent before `write`."""
        mapped = MappedFiles(self.folder, self.contents.files)
        started = []
        for writer in range(len(self.ranks)):
            supply = Supply(self.contents, writer)
            hello = self.hello(version, lease, f"rank {writer}")
            shipment = Shipment(hello, TOKEN.encode(), self.contents, streams, patience)
            started += [(supply, HostSender(target, shipment, mapped, supply)) for target in targets]
        return started

    def write(self, supplies: Sequence[Supply]) -> None:
        """Write what each rank owns; `supplies` has one for each rank."""

        def note(supply: Supply) -> Callable[[str, int, int, torch.Tensor], None]:
            return lambda name, row, column, block: supply.note(name, block.numel())

        with files.Writer(self.folder, self.plan) as writer:
            for shards, supply in zip(self.ranks, supplies, strict=True):
                export(shards, self.specs, [writer.put, note(supply)])


def list_supplies(started: Sequence[tuple[Supply, HostSender]]) -> list[Supply]:
    """List the supply of each rank once."""
    return list(dict.fromkeys(supply for supply, _ in started))


def read_tensors(folder: Path) -> Iterator[bytes]:
    """Yield the bytes of a folder's files of tensors."""
    for path in sorted(folder.glob("*.safetensors")):
        yield path.read_bytes()
