"""The layout of a pipeline stage's tensors over the ranks of one replica, each of which sends its own parts.

The *senders* are the tensor-parallel ranks of the stage's first replica, in their order. A tensor has one of three
layouts, which follows from the pieces that the senders hold:

- divided: each sender has an equal part along one dimension, and the parts in the senders' order are the tensor;
- whole: every sender has all of it;
- gathered: anything else, as experts on other ranks or a vocabulary whose padding moves the ranks' borders. The ranks
  of the stage gather it before it is sent, so that every sender has all of it.

Every tensor of a stage is in its layout once, those that are gathered last. The limits are those of NCCL M2N.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import Mapping, Piece, TensorSpec
from megatron_rl.shared.weights.shards import Shard, StageRank

MOST_DIMENSIONS = 3
MOST_SENDERS = 16
"""The most parts of a tensor that one receiver may get."""


@dataclasses.dataclass(frozen=True)
class LaidOutTensor:
    """A tensor with its layout over the senders."""

    spec: TensorSpec
    parameter: str
    """The parameter that has it, of which a sender may have no part if it is gathered."""
    dim: int | None = None
    """The dimension along which it is divided; None if every sender has all of it."""
    is_gathered: bool = False


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """The senders of a stage, and the tensors that they send, in their order."""

    senders: tuple[int, ...]
    tensors: tuple[LaidOutTensor, ...]

    @property
    def gathered(self) -> set[str]:
        """The names of the tensors that are gathered."""
        return {tensor.spec.name for tensor in self.tensors if tensor.is_gathered}


def lay_out_stage(
    mapping: Mapping, peers: Sequence[StageRank], padded_vocab_size: int, dtype: str | None = None
) -> StageLayout:
    """Lay out the tensors that the ranks `peers` of a stage export."""
    senders = sorted(
        (peer for peer in peers if peer.coordinates.data_rank == 0), key=lambda peer: peer.coordinates.tensor_rank
    )
    if len(senders) > MOST_SENDERS:
        raise InputError(
            f"{len(senders)} tensor-parallel ranks are more than the {MOST_SENDERS} that NCCL M2N sends from: write "
            "--rollout-transport nccl, or a smaller --tensor-model-parallel-size"
        )
    # A copy of a tied embedding is a parameter too, which no rank exports.
    exported = {
        name
        for peer in peers
        for name in peer.parameter_names
        if mapping.shard(name, peer.coordinates, padded_vocab_size).owned
    }
    parameters = {tensor: parameter for parameter in exported for tensor in mapping.describe(parameter)[2]}
    held = [_find_pieces(mapping, peer, padded_vocab_size, exported) for peer in senders]
    tensors = [
        _lay_out(spec, parameters[spec.name], [of_sender.get(spec.name, []) for of_sender in held])
        for spec in mapping.manifest(dtype)
        if spec.name in parameters
    ]
    for tensor in tensors:
        if not 1 <= len(tensor.spec.shape) <= MOST_DIMENSIONS:
            raise InputError(
                f"{tensor.spec.name} has {len(tensor.spec.shape)} dimensions, and NCCL M2N sends 1 to "
                f"{MOST_DIMENSIONS}: write --rollout-transport nccl"
            )
    tensors.sort(key=lambda tensor: tensor.is_gathered)
    return StageLayout(tuple(peer.rank for peer in senders), tuple(tensors))


def list_sent_parts(shards: Sequence[Shard], tensors: Sequence[LaidOutTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this sender's part of each tensor that is not gathered, in the dtype of its export."""
    by_name = {shard.parameter_name: shard for shard in shards}
    # The tensors of a parameter follow each other, and its values may have to be computed.
    latest, values = None, torch.empty(0)
    for tensor in tensors:
        if tensor.is_gathered:
            continue
        shard = by_name[tensor.parameter]
        if shard is not latest:
            latest, values = shard, shard.values()
        pieces = [piece for piece in shard.map.pieces if piece.name == tensor.spec.name]
        ordered = sorted(pieces, key=lambda piece: piece.source)
        parts = [values.narrow(piece.dim, piece.target, piece.length) for piece in ordered]
        part = parts[0] if len(parts) == 1 else torch.cat(parts, dim=ordered[0].dim)
        yield tensor.spec.name, part.to(DTYPES[tensor.spec.dtype]).contiguous()


def _find_pieces(
    mapping: Mapping, peer: StageRank, padded_vocab_size: int, exported: set[str]
) -> dict[str, list[Piece]]:
    """Find the pieces of each tensor that a rank holds, in parameters that some rank exports."""
    found: dict[str, list[Piece]] = {}
    for name in peer.parameter_names:
        if name in exported:
            for piece in mapping.shard(name, peer.coordinates, padded_vocab_size).pieces:
                found.setdefault(piece.name, []).append(piece)
    return found


def _lay_out(spec: TensorSpec, parameter: str, held: Sequence[Sequence[Piece]]) -> LaidOutTensor:
    """Find the layout of a tensor from the pieces that each sender holds."""
    dims = {piece.dim for pieces in held for piece in pieces}
    if len(dims) == 1:
        (dim,) = dims
        ranges = [_find_range(pieces) for pieces in held]
        size, length = spec.shape[dim], spec.shape[dim] // len(held)
        if all(found == (0, size) for found in ranges):
            return LaidOutTensor(spec, parameter)
        if size % len(held) == 0 and ranges == [(i * length, (i + 1) * length) for i in range(len(held))]:
            return LaidOutTensor(spec, parameter, dim)
    return LaidOutTensor(spec, parameter, is_gathered=True)


def _find_range(pieces: Sequence[Piece]) -> tuple[int, int] | None:
    """Return the range that pieces cover together; None if they leave a gap or cover something twice."""
    ordered = sorted(pieces, key=lambda piece: piece.source)
    ends = [piece.source + piece.length for piece in ordered]
    if not ordered or ends[:-1] != [piece.source for piece in ordered[1:]]:
        return None
    return ordered[0].source, ends[-1]
