"""A stand-in for memory that devices share: the host's, which several processes map. And offers of tensors in it."""

from collections.abc import Mapping

import torch

from megatron_rl.platforms.platform import CannotShare, MemoryHandle
from megatron_rl.shared.weights.offer import Offer, OfferedPiece, RankOffer, identify_host

NUM_RANKS = 2


class HostSharing:
    """Satisfies `DeviceSharing` with torch's own shared memory of the host."""

    def __init__(self, *obstacles: str) -> None:
        self.obstacles = list(obstacles)
        self.num_shared = self.num_opened = 0

    def find_obstacles(self) -> list[str]:
        return self.obstacles

    def share(self, storage: torch.UntypedStorage) -> MemoryHandle:
        self.num_shared += 1
        manager, name, num_bytes = storage._share_filename_cpu_()  # type: ignore[attr-defined]
        return MemoryHandle(device="host", memory=name, num_bytes=num_bytes, first_byte=0, counter=manager)

    def open(self, handle: MemoryHandle) -> torch.Tensor:
        self.num_opened += 1
        try:
            storage = torch.UntypedStorage._new_shared_filename_cpu(  # type: ignore[attr-defined]
                handle.counter, handle.memory, handle.num_bytes
            )
        except RuntimeError as error:
            raise CannotShare(f"memory {handle.memory!r} cannot be opened: {error}") from None
        return torch.empty(0, dtype=torch.uint8).set_(storage)


class Ranks:
    """The memory of two tensor-parallel ranks: halves of rows or, of some tensors, of columns."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], by_columns: frozenset[str] = frozenset()) -> None:
        self.sharing = HostSharing()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtype = next(iter(tensors.values())).dtype
        self.memories = [torch.empty(0)] * NUM_RANKS
        self.ranks: list[RankOffer] = []
        self._by_columns = by_columns
        self._places: list[list[OfferedPiece]] = []
        for rank in range(NUM_RANKS):
            pieces, end = [], 0
            for number, name in enumerate(tensors):
                matrix_RC = tensors[name].reshape(len(tensors[name]), -1)
                dim = int(name in by_columns)
                length = matrix_RC.shape[dim] // NUM_RANKS
                first = rank * length
                length = matrix_RC.shape[dim] - first if rank == NUM_RANKS - 1 else length
                corner, shape = (first, 0), (length, matrix_RC.shape[1])
                if dim:
                    corner, shape = (0, first), (matrix_RC.shape[0], length)
                # The next row begins after a gap.
                pitch = shape[1] + 3
                if min(shape):
                    pieces.append(OfferedPiece(number, *corner, *shape, 0, end, pitch))
                end += shape[0] * pitch
            self._places.append(pieces)
            self.memories[rank] = torch.full((end,), torch.nan, dtype=self.dtype)
        self.share()
        self.put(tensors)

    def share(self) -> None:
        """Move to other memory, and share that."""
        for rank, pieces in enumerate(self._places):
            self.memories[rank] = self.memories[rank].clone()
            handle = self.sharing.share(self.memories[rank].untyped_storage())
            generation = self.ranks[rank].generation + 1 if len(self.ranks) > rank else 1
            self.ranks[rank:rank + 1] = [RankOffer(generation, [handle], pieces)]  # fmt: skip

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Change the weights, as an update does."""
        for memory, pieces in zip(self.memories, self._places, strict=True):
            for piece in pieces:
                tensor = tensors[list(self.shapes)[piece.tensor]]
                given_RC = tensor.reshape(len(tensor), -1)[piece.first_row :, piece.first_column :]
                view = memory.as_strided((piece.num_rows, piece.num_columns), (piece.pitch, 1), piece.first_element)
                view.copy_(given_RC[: piece.num_rows, : piece.num_columns])

    def offer(self, fingerprint: str = "") -> Offer:
        dtype = str(self.dtype).removeprefix("torch.")
        return Offer(
            fingerprint,
            identify_host(),
            str(torch.__version__),
            "run",
            dtype,
            list(self.shapes.items()),
            list(self.ranks),
        )
