"""One rank's parameters and what they mean in the checkpoint: filled from it, written to it, digested.

Letters: R rows, C columns of a tensor seen as a matrix (all dimensions but the first are its columns).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_rl.errors import InputError
from megatron_rl.weights.fingerprint import DTYPES, NUM_LANES, digest
from megatron_rl.weights.mapping import Coordinates, Mapping, Piece, ShardMap, TensorSpec
from megatron_rl.weights.reader import Checkpoint

# Blocks this large amortize a call's cost and, on a CPU, are still in cache when they are digested.
_BLOCK_ELEMENTS_CPU = 1 << 20
_BLOCK_ELEMENTS_DEVICE = 1 << 26

Put = Callable[[str, int, int, torch.Tensor], None]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A parameter of this rank, and where its parts belong."""

    parameter_name: str
    parameter: torch.Tensor
    map: ShardMap

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill the parameter; rows that pad the vocabulary become zero."""
        target = self.parameter.detach()
        for piece in self.map.pieces:
            source = checkpoint.tensor(piece.name).narrow(piece.dim, piece.source, piece.length)
            target.narrow(piece.dim, piece.target, piece.length).copy_(source)
        self.zero_padding()
        # Of the copy, so that a value which its dtype cannot hold is found too; the extremes of the whole are finite
        # when everything is, and cost a fraction of the copy.
        if not _is_finite(target):
            broken = [p.name for p in self.map.pieces if not _is_finite(target.narrow(p.dim, p.target, p.length))]
            raise InputError(
                f"{broken[0]} in {checkpoint.folder} holds numbers that are not finite in {target.dtype}: "
                f"use a checkpoint without them, or train in the dtype that it is stored in"
            )

    def zero_padding(self) -> None:
        """Clear what no piece covers: the last rows, where the vocabulary is padded."""
        covered = sum(piece.length for piece in self.map.pieces)
        dim = self.map.pieces[0].dim if self.map.pieces else 0
        if covered < self.map.shape[dim]:
            self.parameter.detach().narrow(dim, covered, self.map.shape[dim] - covered).zero_()

    def blocks(self, piece: Piece) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The piece in blocks of rows, each with the row and column of the tensor at which it begins."""
        values = self.parameter.detach().narrow(piece.dim, piece.target, piece.length)
        first_row, first_column = (piece.source, 0) if piece.dim == 0 else (0, piece.source)
        limit = _BLOCK_ELEMENTS_CPU if values.device.type == "cpu" else _BLOCK_ELEMENTS_DEVICE
        step = max(1, limit // max(1, values[0].numel()))
        for start in range(0, values.shape[0], step):
            yield first_row + start, first_column, values[start : start + step]


def shards_of(
    mapping: Mapping,
    coordinates: Coordinates,
    padded_vocab_size: int,
    parameters: Iterable[tuple[str, torch.Tensor]],
) -> list[Shard]:
    """A rank's parameters, given under their global names, with their meaning; their shapes are checked."""
    shards = []
    for name, parameter in parameters:
        shard_map = mapping.shard(name, coordinates, padded_vocab_size)
        if tuple(parameter.shape) != shard_map.shape:
            raise InputError(
                f"the parameter {name} has shape {list(parameter.shape)}, its tensors give {list(shard_map.shape)}: "
                f"the model was built for another architecture or another tensor-parallel size"
            )
        shards.append(Shard(name, parameter, shard_map))
    return shards


def _is_finite(values: torch.Tensor) -> bool:
    return bool(torch.stack(torch.aminmax(values)).isfinite().all())


class Digests:
    """The sums over this rank's slices, by tensor; `combine` makes them the tensors' own."""

    def __init__(self, specs: Sequence[TensorSpec]):
        self.specs = list(specs)
        self._index = {spec.name: index for index, spec in enumerate(self.specs)}
        # The last column counts elements: the proof that every tensor was covered once.
        self._sums = torch.zeros(len(self.specs), NUM_LANES + 1, dtype=torch.int64)

    def add(self, name: str, first_row: int, first_column: int, block: torch.Tensor) -> None:
        """Count a block of a tensor in, in the dtype that the tensor is exported in."""
        sums = self._sums[self._index[name]]
        sums[:NUM_LANES] += digest(block, first_row, first_column).cpu()
        sums[NUM_LANES] += block.numel()

    def combine(self, group: dist.ProcessGroup | None = None) -> dict[str, list[int]]:
        """Every tensor's digest, over all ranks; raises when a slice was left out or counted twice."""
        if group is not None:
            dist.all_reduce(self._sums, group=group)
        for spec, sums in zip(self.specs, self._sums.tolist(), strict=True):
            if sums[NUM_LANES] != spec.num_elements:
                raise InputError(
                    f"{spec.name} has {spec.num_elements} elements and {sums[NUM_LANES]} were exported: "
                    f"the ranks do not hold the model between them"
                )
        return {spec.name: self._sums[i, :NUM_LANES].tolist() for i, spec in enumerate(self.specs)}


def export(shards: Sequence[Shard], digests: Digests, put: Put | None = None, first: int = 0) -> None:
    """Digest every slice that this rank owns, and hand it to `put` on the CPU, in the dtype it is exported in.

    `first` is the shard to begin with; the ones before it come last.
    """
    dtypes = {spec.name: DTYPES[spec.dtype] for spec in digests.specs}
    for shard in (*shards[first:], *shards[:first]):
        if not shard.map.owned:
            continue
        for piece in shard.map.pieces:
            for first_row, first_column, values in shard.blocks(piece):
                block = values.to(dtypes[piece.name])
                if put is not None:
                    put(piece.name, first_row, first_column, block.cpu())
                digests.add(piece.name, first_row, first_column, block)
