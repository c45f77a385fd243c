"""A stage's tensors whole, bucket after bucket, gathered over the ranks that share them; nothing crosses stages.

Every rank of the stage walks through the same buckets. The stage's first rank receives the tensors, the others nothing.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_rl.weights.fingerprint import DTYPES
from megatron_rl.weights.mapping import Coordinates, Mapping, Piece, ShardMap, TensorSpec
from megatron_rl.weights.shards import Digests, Shard

Bucket = list[tuple[str, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A rank of the stage, and what it holds: known without asking, but for the names of its parameters."""

    rank: int
    coordinates: Coordinates
    parameter_names: tuple[str, ...]


class Stream:
    """The buckets of one stage, laid out once and walked through at every export."""

    def __init__(
        self,
        mapping: Mapping,
        peers: Sequence[Peer],
        padded_vocab_size: int,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: str | None = None,
        bucket_bytes: int = 1 << 28,
    ):
        self._peers = peers
        self._group = group
        self._device = device
        owned = [_owned_pieces(mapping, peer, padded_vocab_size) for peer in peers]
        held = {piece.name for pieces in owned for _, piece in pieces}
        specs = [spec for spec in mapping.manifest(dtype) if spec.name in held]
        self._buckets = _split(specs, bucket_bytes)
        self._bucket_of = {spec.name: i for i, bucket in enumerate(self._buckets) for spec in bucket}
        self._pieces = [self._by_bucket(pieces) for pieces in owned]

    @property
    def specs(self) -> list[list[TensorSpec]]:
        """What the buckets hold."""
        return self._buckets

    def buckets(self, shards: Sequence[Shard], digests: Digests | None = None) -> Iterator[Bucket]:
        """Each bucket in turn; with `digests`, what this rank owns is counted in on the way."""
        parameters = {shard.parameter_name: shard.parameter.detach() for shard in shards}
        me = next(i for i, peer in enumerate(self._peers) if peer.rank == dist.get_rank())
        for index, specs in enumerate(self._buckets):
            dtype = DTYPES[specs[0].dtype]
            mine = []
            for name, piece in self._pieces[me][index]:
                part = parameters[name].narrow(piece.dim, piece.target, piece.length).to(dtype)
                if digests is not None:
                    digests.add(piece.name, *((piece.source, 0) if piece.dim == 0 else (0, piece.source)), part)
                mine.append(part)
            if me != 0:
                if mine:
                    flat = torch.cat([part.reshape(-1) for part in mine])
                    dist.send(flat, self._peers[0].rank, group=self._group)
                yield []
            else:
                yield self._assemble(index, specs, mine)

    def _assemble(self, index: int, specs: Sequence[TensorSpec], mine: list[torch.Tensor]) -> Bucket:
        device, dtype = self._device, DTYPES[specs[0].dtype]
        whole = {spec.name: torch.empty(spec.shape, dtype=dtype, device=device) for spec in specs}
        for (_, piece), part in zip(self._pieces[0][index], mine, strict=True):
            whole[piece.name].narrow(piece.dim, piece.source, piece.length).copy_(part)
        for peer, pieces in zip(self._peers[1:], self._pieces[1:], strict=True):
            targets = [whole[p.name].narrow(p.dim, p.source, p.length) for _, p in pieces[index]]
            if targets:
                flat = torch.empty(sum(target.numel() for target in targets), dtype=dtype, device=device)
                dist.recv(flat, peer.rank, group=self._group)
                for target, part in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
                    target.copy_(part.view(target.shape))
        return [(spec.name, whole[spec.name]) for spec in specs]

    def _by_bucket(self, pieces: list[tuple[str, Piece]]) -> list[list[tuple[str, Piece]]]:
        buckets: list[list[tuple[str, Piece]]] = [[] for _ in self._buckets]
        for name, piece in pieces:
            buckets[self._bucket_of[piece.name]].append((name, piece))
        return buckets


def _owned_pieces(mapping: Mapping, peer: Peer, padded_vocab_size: int) -> list[tuple[str, Piece]]:
    maps: list[tuple[str, ShardMap]] = [
        (name, mapping.shard(name, peer.coordinates, padded_vocab_size)) for name in peer.parameter_names
    ]
    return [(name, piece) for name, shard_map in maps if shard_map.owned for piece in shard_map.pieces]


def _split(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    buckets: list[list[TensorSpec]] = []
    filled = bucket_bytes
    for spec in specs:
        num_bytes = spec.num_elements * DTYPES[spec.dtype].itemsize
        if filled + num_bytes > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(spec)
        filled += num_bytes
    return buckets
