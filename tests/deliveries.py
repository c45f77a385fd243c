"""A trainer's ranks for tests of deliveries: what they own, written to files, and sent to receivers."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.delivery.channel import Shipment
from megatron_rl.shared.weights.delivery.control import Control
from megatron_rl.shared.weights.delivery.mapped import MappedFiles
from megatron_rl.shared.weights.delivery.messages import Contents, Hello, Target
from megatron_rl.shared.weights.delivery.sender import HostSender, Supply
from megatron_rl.shared.weights.fingerprint import compute_fingerprint
from megatron_rl.shared.weights.mapping import Mapping
from megatron_rl.shared.weights.parcels import describe_contents, list_portions
from megatron_rl.shared.weights.shards import Digests, Shard, export
from megatron_rl.types import Architecture

TOKEN = "the token of this run"


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
