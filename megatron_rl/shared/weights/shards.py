"""One rank's parameters as parts of a checkpoint: read from it, written to it, digested.

Letters: R rows, C columns of a tensor seen as a matrix (all dimensions but the first are its columns).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Mapping as MappingABC
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.errors import InputError
from megatron_rl.shared.weights.files import Checkpoint, FilePlan, Writer, split_specs
from megatron_rl.shared.weights.fingerprint import DTYPES, NUM_LANES, digest, digest_each, digests_by_row
from megatron_rl.shared.weights.mapping import Coordinates, Mapping, Piece, ShardMap, TensorSpec

# Large enough to amortize a call and, on a CPU, small enough that blocks are still in cache when they are digested.
_BLOCK_ELEMENTS_CPU = 1 << 20
_BLOCK_ELEMENTS_DEVICE = 1 << 26
# Shards of one piece below this size are digested together, some at a time.
_SMALL_ELEMENTS = 1 << 17
_SHARDS_AT_A_TIME = 256

Put = Callable[[str, int, int, torch.Tensor], None]
Count = Callable[[str, int], None]
"""A function that learns how many elements of a tensor have been written."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """A parameter of this rank, with the places of its parts in the checkpoint."""

    parameter_name: str
    parameter: torch.Tensor
    map: ShardMap
    compute: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The function of the parameter that is exported in its place."""

    def values(self) -> torch.Tensor:
        """Return the numbers that are exported; a caller that needs several slices calls it once."""
        values = self.parameter.detach()
        return values if self.compute is None else self.compute(values)

    @property
    def is_small(self) -> bool:
        """True if it is one piece, for which an operation takes longer to begin than to run."""
        return len(self.map.pieces) == 1 and self.parameter.numel() < _SMALL_ELEMENTS

    def fill(self, checkpoint: Checkpoint) -> torch.Tensor:
        """Fill the parameter from the checkpoint; rows that pad the vocabulary become zero.

        Return, as one value on the parameter's device, whether all of its numbers are finite.
        """
        target = self.parameter.detach()
        for piece in self.map.pieces:
            source = checkpoint.tensor(piece.name).narrow(piece.dim, piece.source, piece.length)
            target.narrow(piece.dim, piece.target, piece.length).copy_(source)
        self.zero_padding()
        return _are_finite(target)

    def zero_padding(self) -> None:
        """Set entries that no piece covers to zero: the last rows, if the vocabulary is padded."""
        covered = sum(piece.length for piece in self.map.pieces)
        dim = self.map.pieces[0].dim if self.map.pieces else 0
        if covered < self.map.shape[dim]:
            self.parameter.detach().narrow(dim, covered, self.map.shape[dim] - covered).zero_()

    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute each row's row in its tensor, and the index of its piece: all pieces must have whole rows.

        Rows that pad the vocabulary, the last ones, have the number of pieces as their index. The result is not cached:
        for a large model it would take a hundred megabytes.
        """
        pieces = self.map.pieces
        order = sorted(range(len(pieces)), key=lambda index: pieces[index].target)
        lengths = [pieces[index].length for index in order]
        shifts = [pieces[index].source - pieces[index].target for index in order]
        num_padding = self.map.shape[0] - sum(lengths)
        lengths_P = torch.tensor([*lengths, num_padding])
        pieces_R = torch.tensor([*order, len(pieces)]).repeat_interleave(lengths_P)
        rows_R = torch.arange(self.map.shape[0]) + torch.tensor([*shifts, 0]).repeat_interleave(lengths_P)
        rows_R[len(rows_R) - num_padding :] = 0
        return rows_R.to(self.parameter.device), pieces_R.to(self.parameter.device)

    def digest_pieces(self, dtype: torch.dtype) -> torch.Tensor:
        """Digest each piece in the dtype of its export: (pieces, lanes).

        Several pieces of whole rows are digested in one pass, since a parameter may have hundreds of small ones.
        """
        values, pieces = self.values(), self.map.pieces
        if len(pieces) == 1 or any(piece.dim != 0 for piece in pieces):
            parts = [
                torch.stack([digest(one.to(dtype), row, column) for row, column, one in blocks(piece, values)]).sum(0)
                for piece in pieces
            ]
            return torch.stack(parts)
        rows_R, pieces_R = self._rows()
        num_rows = max(piece.source + piece.length for piece in pieces)
        matrix_RC = values.reshape(values.shape[0], -1)
        # Another dtype needs a copy, which is made of some rows at a time.
        step = len(values) if values.dtype == dtype else max(1, _block_elements(values) // max(1, matrix_RC.shape[1]))
        sums = torch.zeros(len(pieces), NUM_LANES, dtype=torch.int64, device=values.device)
        for some in (slice(start, start + step) for start in range(0, len(values), step)):
            sums += digests_by_row(matrix_RC[some].to(dtype), 0, rows_R[some], num_rows, pieces_R[some], len(pieces))
        return sums


def blocks(piece: Piece, values: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield a piece of a shard's values in blocks of rows, each with the row and column of the tensor at its start."""
    values = values.narrow(piece.dim, piece.target, piece.length)
    first_row, first_column = (piece.source, 0) if piece.dim == 0 else (0, piece.source)
    step = max(1, _block_elements(values) // max(1, values[0].numel()))
    for start in range(0, values.shape[0], step):
        yield first_row + start, first_column, values[start : start + step]


def _block_elements(values: torch.Tensor) -> int:
    return _BLOCK_ELEMENTS_CPU if values.device.type == "cpu" else _BLOCK_ELEMENTS_DEVICE


def map_shards(
    mapping: Mapping,
    coordinates: Coordinates,
    padded_vocab_size: int,
    parameters: Iterable[tuple[str, torch.Tensor]],
) -> list[Shard]:
    """Map a rank's parameters, given under their global names, to their parts of the checkpoint; check their shapes."""
    shards = []
    for name, parameter in parameters:
        shard_map = mapping.shard(name, coordinates, padded_vocab_size)
        if tuple(parameter.shape) != shard_map.shape:
            raise InputError(
                f"the parameter {name} has shape {list(parameter.shape)}, and its tensors give "
                f"{list(shard_map.shape)}: the model was built for another architecture or another tensor-parallel size"
            )
        shards.append(Shard(name, parameter, shard_map))
    return shards


def find_addresses(shards: Sequence[Shard]) -> list[int]:
    """Return where the parameters lie: a parameter that is moved, as by an optimizer, keeps its shard."""
    return [shard.parameter.data_ptr() for shard in shards]


def load_shards(shards: Sequence[Shard], checkpoint: Checkpoint) -> None:
    """Fill the parameters from the checkpoint; raise an InputError if a number is not finite.

    Beside the copies, the host waits for the device once, whatever the number of parameters.
    """
    are_finite = [shard.fill(checkpoint) for shard in shards]
    if not are_finite or torch.stack(are_finite).all():
        return
    shard = next(shard for shard, is_finite in zip(shards, are_finite, strict=True) if not is_finite)
    values = shard.parameter.detach()
    broken = [p.name for p in shard.map.pieces if not _are_finite(values.narrow(p.dim, p.target, p.length))]
    raise InputError(
        f"{broken[0]} in {checkpoint.folder} holds numbers that are not finite in "
        f"{shard.parameter.dtype}: use another checkpoint, or train in the dtype in which it is stored"
    )


def _are_finite(values: torch.Tensor) -> torch.Tensor:
    """Check what was copied, which also finds values that its dtype cannot hold.

    The extremes are enough, and cost a fraction of the copy.
    """
    return torch.stack(torch.aminmax(values)).isfinite().all()


class Digests:
    """The digests of this rank's slices, summed by tensor; `combine` adds those of all ranks."""

    def __init__(self, specs: Sequence[TensorSpec]):
        self.specs = list(specs)
        self._index = {spec.name: index for index, spec in enumerate(self.specs)}
        # The last column counts elements, to prove that every tensor was covered once.
        self._sums = torch.zeros(len(self.specs), NUM_LANES + 1, dtype=torch.int64)

    def add(self, name: str, first_row: int, first_column: int, block: torch.Tensor) -> None:
        """Add a block of a tensor; it must have the dtype in which the tensor is exported."""
        sums = self._sums[self._index[name]]
        sums[:NUM_LANES] += digest(block, first_row, first_column).cpu()
        sums[NUM_LANES] += block.numel()

    def add_shards(self, shards: Sequence[Shard]) -> None:
        """Add all pieces of parameters, as far as this rank owns them."""
        small: list[Shard] = []
        for shard in shards:
            if not shard.map.owned or not shard.map.pieces:
                continue
            if shard.is_small:
                small.append(shard)
            else:
                self._add_shard(shard)
        for start in range(0, len(small), _SHARDS_AT_A_TIME):
            self._add_small(small[start : start + _SHARDS_AT_A_TIME])

    def _add_small(self, shards: Sequence[Shard]) -> None:
        """Add parameters of one piece each."""
        slices, counts, indices = [], [], []
        for shard in shards:
            (piece,) = shard.map.pieces
            index = self._index[piece.name]
            values = shard.values().narrow(piece.dim, piece.target, piece.length).to(DTYPES[self.specs[index].dtype])
            slices.append((values, *((piece.source, 0) if piece.dim == 0 else (0, piece.source))))
            counts.append(values.numel())
            indices.append(index)
        added = torch.cat([digest_each(slices).cpu(), torch.tensor(counts)[:, None]], dim=1)
        self._sums.index_add_(0, torch.tensor(indices), added)

    def _add_shard(self, shard: Shard) -> None:
        indices = [self._index[piece.name] for piece in shard.map.pieces]
        dtype = DTYPES[self.specs[indices[0]].dtype]
        lanes = shard.digest_pieces(dtype).cpu()
        size, shape = shard.parameter.numel(), shard.parameter.shape
        counts = [size // shape[piece.dim] * piece.length for piece in shard.map.pieces]
        added = torch.cat([lanes, torch.tensor(counts)[:, None]], dim=1)
        self._sums.index_add_(0, torch.tensor(indices), added)

    def add_all(self, lanes: torch.Tensor, counts: torch.Tensor) -> None:
        """Add digests of slices of all tensors, (tensors, lanes), with the number of the slices' elements."""
        self._sums += torch.cat([lanes, counts[:, None]], dim=1)

    def combine(self, group: dist.ProcessGroup | None = None) -> dict[str, list[int]]:
        """Return every tensor's digest over all ranks; raise if a slice is missing or was counted twice."""
        if group is not None:
            dist.all_reduce(self._sums, group=group)
        digests = {}
        for spec, (*lanes, num_elements) in zip(self.specs, self._sums.tolist(), strict=True):
            if num_elements != spec.num_elements:
                raise InputError(
                    f"{spec.name} has {spec.num_elements} elements, and the ranks exported {num_elements}: "
                    f"together they must hold each element of the model once"
                )
            digests[spec.name] = lanes
        return digests


def export(shards: Sequence[Shard], specs: Sequence[TensorSpec], puts: Sequence[Put], first: int = 0) -> None:
    """Hand every slice that this rank owns to each of `puts`, in the dtype of the export.

    `first` is the index of the shard to begin with; the shards before it come last.
    """
    dtypes = {spec.name: DTYPES[spec.dtype] for spec in specs}
    for shard in (*shards[first:], *shards[:first]):
        if not shard.map.owned:
            continue
        of_shard = shard.values()
        for piece in shard.map.pieces:
            for first_row, first_column, values in blocks(piece, of_shard):
                block = values.to(dtypes[piece.name])
                for put in puts:
                    put(piece.name, first_row, first_column, block)


def divide_small(
    shards: Sequence[Shard], specs: MappingABC[str, TensorSpec]
) -> tuple[Iterator[list[tuple[str, torch.Tensor]]], list[Shard]]:
    """Return the small tensors that this rank owns whole, some at a time in the dtype of the export, and the rest."""
    small: list[Shard] = []
    others: list[Shard] = []
    for shard in shards:
        is_whole = shard.is_small and tuple(shard.parameter.shape) == specs[shard.map.pieces[0].name].shape
        (small if is_whole and shard.map.owned else others).append(shard)

    def read() -> Iterator[list[tuple[str, torch.Tensor]]]:
        for start in range(0, len(small), _SHARDS_AT_A_TIME):
            some = [(shard.map.pieces[0].name, shard) for shard in small[start : start + _SHARDS_AT_A_TIME]]
            yield [(name, shard.values().to(DTYPES[specs[name].dtype])) for name, shard in some]

    return read(), others


class HostExport:
    """Exports of a rank's shards by one plan, again and again: one parameter after the other, in blocks.

    It exports from the host, and values that must be computed first. `DeviceExport` does the same from a device.
    """

    def __init__(self, shards: Sequence[Shard], plan: FilePlan, start: float = 0):
        """Make it; without a count, this share of shards is written last, so that ranks begin at different files."""
        self.plan = plan
        self._shards = shards
        self._start = start

    def add_digests(self, digests: Digests) -> None:
        """Add the digests of all that this rank owns."""
        digests.add_shards(self._shards)

    def write(self, folder: Path, count: Count | None = None) -> None:
        """Write all that this rank owns into files; `count` learns of the elements of each tensor that have arrived."""
        specs, note = self.plan.specs, count or (lambda name, num_elements: None)
        small, others = divide_small(self._shards, specs)
        # Readers take the first tensors first.
        first = int(len(others) * self._start) if count is None else 0
        with Writer(folder, self.plan) as writer:
            for some in small:
                writer.put_whole(some)
                for name, tensor in some:
                    note(name, tensor.numel())

            def note_block(name: str, first_row: int, first_column: int, block: torch.Tensor) -> None:
                note(name, block.numel())

            export(others, list(specs.values()), [writer.put, note_block], first)

    def forget_files(self) -> None:
        """Do nothing, since nothing is kept of files between publishes."""


Bucket = list[tuple[str, torch.Tensor]]


class WeightStream:
    """All tensors in buckets, laid out once and gathered on rank 0 at every export."""

    def __init__(
        self,
        mapping: Mapping,
        rank: int,
        peers: Sequence[tuple[Coordinates, Sequence[str]]],
        padded_vocab_size: int,
        dtype: str | None,
        bucket_bytes: int,
    ):
        """Lay the buckets out; `peers` are the coordinates of each rank, with the names of its parameters."""
        manifest = mapping.manifest(dtype)
        # A bucket travels as one tensor, of one dtype. Tensors of another dtype than the first come last.
        ordered = sorted(manifest, key=lambda spec: spec.dtype != manifest[0].dtype)
        self.specs = split_specs(ordered, bucket_bytes, by_dtype=True)
        self._rank = rank
        bucket_of = {spec.name: number for number, bucket in enumerate(self.specs) for spec in bucket}
        self._pieces: dict[int, list[list[tuple[str, Piece]]]] = {}
        """The owned pieces of each bucket, with the names of their parameters: rank 0's of all ranks, another's own."""
        for number, (coordinates, names) in enumerate(peers):
            if rank in (0, number):
                self._pieces[number] = [[] for _ in self.specs]
                for name in names:
                    shard_map = mapping.shard(name, coordinates, padded_vocab_size)
                    for piece in shard_map.pieces if shard_map.owned else ():
                        self._pieces[number][bucket_of[piece.name]].append((name, piece))

    def buckets(self, shards: Sequence[Shard]) -> Iterator[Bucket]:
        """Gather each bucket on rank 0; yield empty ones on other ranks."""
        by_name = {shard.parameter_name: shard for shard in shards}
        for index, specs in enumerate(self.specs):
            dtype = DTYPES[specs[0].dtype]
            owned = self._pieces[self._rank][index]
            values = {name: by_name[name].values() for name, _ in owned}
            parts = [values[name].narrow(piece.dim, piece.target, piece.length).to(dtype) for name, piece in owned]
            if self._rank == 0:
                yield self._assemble(index, parts, shards[0].parameter.device)
            else:
                if parts:
                    dist.send(torch.cat([part.reshape(-1) for part in parts]), 0)
                yield []

    def _assemble(self, index: int, parts: Sequence[torch.Tensor], device: torch.device) -> Bucket:
        specs = self.specs[index]
        dtype = DTYPES[specs[0].dtype]
        whole = {spec.name: torch.empty(spec.shape, dtype=dtype, device=device) for spec in specs}
        for rank, pieces in self._pieces.items():
            targets = [whole[piece.name].narrow(piece.dim, piece.source, piece.length) for _, piece in pieces[index]]
            if rank == 0:
                for target, part in zip(targets, parts, strict=True):
                    target.copy_(part)
            elif targets:
                flat = torch.empty(sum(target.numel() for target in targets), dtype=dtype, device=device)
                dist.recv(flat, rank)
                for target, part in zip(targets, flat.split([one.numel() for one in targets]), strict=True):
                    target.copy_(part.view(target.shape))
        return [(spec.name, whole[spec.name]) for spec in specs]
