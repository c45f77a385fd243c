"""The trainer's half of a publish from device to device on one host: its ranks offer engines their own memory.

Engines copy what they hold from there (`sidecar/vllm/in_place.py`), while files are written for engines that cannot,
and for those that are restarted later.
"""

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from megatron_rl.errors import UsageError
from megatron_rl.platforms.platform import CannotShare, DeviceSharing
from megatron_rl.shared.protocol.wire import PublishAnswer
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import (
    Offer,
    OfferedPiece,
    RankOffer,
    identify_host,
    withdraw_offer,
    write_offer,
)
from megatron_rl.shared.weights.parcels import list_slices
from megatron_rl.shared.weights.shards import Shard, find_addresses
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.session import Session

Through = Literal["auto", "files", "ipc"]

_NAMED = 5
_log = logging.getLogger(__name__)


class Offers:
    """Offers of a run's weights, one for each version. Every rank calls each method."""

    def __init__(
        self, weights: ModelWeights, session: Session, through: Through, dtype: str | None, is_in_memory: bool
    ):
        """Find out whether this run can offer its memory; raise UsageError if it cannot, and `through` is "ipc"."""
        self._weights = weights
        self._session = session
        self._through = through
        self._dtype = dtype or weights.architecture.dtype
        self._specs = weights.list_specs(self._dtype)
        self._run = secrets.token_hex(8)
        self._ranks: list[RankOffer] = [RankOffer(0, [], [])] * session.world_size
        self._sharing: DeviceSharing | None = None
        # The places of the parameters whose storages have been shared, and how often these have changed.
        self._addresses: list[int] = []
        self._generation = 0
        if through == "files":
            return
        sharing = session.platform.device_sharing()
        if weights.adapters is not None:
            reasons = ["adapters are trained, and no memory of a device holds what is published"]
        elif sharing is None:
            reasons = [f"the trainer's platform is {session.platform.name}"]
        elif not is_in_memory:
            reasons = ["the folder for published files is not in memory"]
        else:
            is_one_host = len(set(session.gather(identify_host()))) == 1
            own = [] if is_one_host else ["the trainer's ranks are in several namespaces, or on several hosts"]
            own += [f"the trainer's {obstacle}" for obstacle in sharing.find_obstacles()]
            own += _find_other_dtypes(weights.shards, self._specs)
            reasons = list(dict.fromkeys(reason for of_rank in session.gather(own) for reason in of_rank))
        if sharing is None or reasons:
            self._give_up(reasons)
        else:
            self._sharing = sharing

    def put(self, folder: Path, fingerprint: str) -> bool:
        """Offer this version's weights in a folder that no engine knows yet; return whether they are offered."""
        session = self._session
        if self._sharing is None:
            return False
        changed, reasons = zip(*session.gather_or_raise_everywhere(self._describe), strict=True)
        if any(reasons):
            self._give_up([reason for reason in dict.fromkeys(reasons) if reason])
            return False
        self._ranks = [new or old for new, old in zip(changed, self._ranks, strict=True)]
        tensors = [(spec.name, spec.shape) for spec in self._specs]
        others = {spec.name: spec.dtype for spec in self._specs if spec.dtype != self._dtype}
        offer = Offer(
            fingerprint, identify_host(), str(torch.__version__), self._run, self._dtype, tensors, self._ranks, others
        )
        session.run_on_first(lambda: write_offer(folder, offer))
        return True

    def withdraw(self, folder: Path, seconds: float) -> None:
        """End the offer in a folder: afterwards no engine reads this run's memory, so weights may change."""
        if self._sharing is not None:
            self._session.run_on_first(lambda: withdraw_offer(folder, seconds))

    def end(self, answer: PublishAnswer) -> None:
        """Offer nothing more if any engine did not take the offer, since a publish waits for the slowest engine.

        Raise UsageError if engines must take it.
        """
        if self._sharing is not None and answer.through != "ipc":
            self._give_up(answer.reasons or ("engines hold no weights",))

    def _describe(self) -> tuple[RankOffer | None, str]:
        """Return this rank's part if a parameter has moved, and why there is none if it cannot be shared."""
        shards = self._weights.shards
        if find_addresses(shards) == self._addresses:
            return None, ""
        try:
            offer = self._share(shards)
        except CannotShare as refusal:
            return None, f"memory of rank {self._session.rank} cannot be shared: {refusal}"
        self._addresses = find_addresses(shards)
        return offer, ""

    def _share(self, shards: Sequence[Shard]) -> RankOffer:
        """Share the storages of all that this rank owns, and describe the places of its pieces in them."""
        assert self._sharing is not None
        slices = list_slices(shards, [spec.name for spec in self._specs])
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
        self._generation += 1
        return RankOffer(self._generation, handles, pieces)

    def _give_up(self, reasons: Sequence[str]) -> None:
        self._sharing = None
        if self._through == "ipc":
            raise UsageError(f"--publish-through ipc cannot be: {'; '.join(reasons)}. Write auto or files")
        if self._session.rank == 0:
            _log.info("engines read published weights from files, not from devices: %s", "; ".join(reasons))


def _find_other_dtypes(shards: Sequence[Shard], specs: Sequence[TensorSpec]) -> list[str]:
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
