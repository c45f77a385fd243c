"""A rank's shards as a part of an offer: the storages that hold them, shared once, and the places of their pieces."""

from collections.abc import Sequence

import torch

from megatron_rl.platforms.device_sharing import CannotShare, DeviceSharing
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import OfferedPiece, RankOffer
from megatron_rl.shared.weights.parcels import list_slices
from megatron_rl.shared.weights.shards import Shard, find_addresses

_NAMED = 5


class OfferedShards:
    """The part of an offer that is a rank's own. Storages are shared again only if a parameter has moved."""

    def __init__(self, sharing: DeviceSharing, shards: Sequence[Shard], specs: Sequence[TensorSpec]):
        self._sharing = sharing
        self._shards = shards
        self._tensors = [spec.name for spec in specs]
        self._addresses: list[int] = []
        self._generation = 0

    def describe(self) -> RankOffer | None:
        """Return the rank's part of an offer; None if it is what the last call returned."""
        if find_addresses(self._shards) == self._addresses:
            return None
        slices = list_slices(self._shards, self._tensors)
        if any(one.values_RC.shape[1] > 1 and one.values_RC.stride(1) != 1 for one in slices):
            raise CannotShare("parameters have rows that are not one piece of memory")
        storages: dict[int, torch.UntypedStorage] = {}
        for one in slices:
            storage = one.values_RC.untyped_storage()
            storages.setdefault(storage.data_ptr(), storage)
        numbers = {address: number for number, address in enumerate(storages)}
        # The slices keep the number of their storage, whose address may change when it is shared.
        memories = [numbers[one.values_RC.untyped_storage().data_ptr()] for one in slices]
        handles = [self._sharing.share(storage) for storage in storages.values()]
        pieces = [
            OfferedPiece(
                tensor=one.tensor,
                first_row=one.first_row,
                first_column=one.first_column,
                num_rows=one.values_RC.shape[0],
                num_columns=one.values_RC.shape[1],
                memory=memory,
                first_element=int(one.values_RC.storage_offset()),
                pitch=one.values_RC.stride(0),
            )
            for one, memory in zip(slices, memories, strict=True)
        ]
        self._addresses = find_addresses(self._shards)
        self._generation += 1
        return RankOffer(self._generation, handles, pieces)


def find_other_dtypes(shards: Sequence[Shard], specs: Sequence[TensorSpec]) -> list[str]:
    """Return why these shards cannot be offered as tensors of these specs: they would have to be converted."""
    published = {spec.name: DTYPES[spec.dtype] for spec in specs}
    others = {
        shard.parameter_name: (shard.parameter.dtype, published[shard.map.pieces[0].name])
        for shard in shards
        if shard.map.owned and shard.map.pieces and shard.parameter.dtype != published[shard.map.pieces[0].name]
    }
    if not others:
        return []
    pairs = sorted({tuple(str(dtype).removeprefix("torch.") for dtype in pair) for pair in others.values()})
    dtypes = ", or ".join(f"trained in {trained} and published in {wanted}" for trained, wanted in pairs)
    names = ", ".join(sorted(others)[:_NAMED])
    return [f"{len(others)} parameters are {dtypes}: {names}"]
