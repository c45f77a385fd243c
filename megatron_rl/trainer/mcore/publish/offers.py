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
from megatron_rl.platforms.platform import CannotShare
from megatron_rl.shared.protocol.wire import PublishAnswer
from megatron_rl.shared.weights.offer import (
    Offer,
    OfferedShards,
    RankOffer,
    find_other_dtypes,
    identify_host,
    withdraw_offer,
    write_offer,
)
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.session import Session

Through = Literal["auto", "files", "ipc"]

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
        self._shards: OfferedShards | None = None
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
            own += find_other_dtypes(weights.shards, self._specs)
            reasons = list(dict.fromkeys(reason for of_rank in session.gather(own) for reason in of_rank))
        if sharing is None or reasons:
            self._give_up(reasons)
        else:
            self._shards = OfferedShards(sharing, weights.shards, self._specs)

    def put(self, folder: Path, fingerprint: str) -> bool:
        """Offer this version's weights in a folder that no engine knows yet; return whether they are offered."""
        session = self._session
        if self._shards is None:
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
        session.run_or_raise_everywhere(lambda: write_offer(folder, offer) if session.rank == 0 else None)
        return True

    def withdraw(self, folder: Path, seconds: float) -> None:
        """End the offer in a folder: afterwards no engine reads this run's memory, so weights may change."""
        if self._shards is not None:
            session = self._session
            session.run_or_raise_everywhere(lambda: withdraw_offer(folder, seconds) if session.rank == 0 else None)

    def end(self, answer: PublishAnswer) -> None:
        """Offer nothing more if any engine did not take the offer, since a publish waits for the slowest engine.

        Raise UsageError if engines must take it.
        """
        if self._shards is not None and answer.through != "ipc":
            self._give_up(answer.reasons or ("engines hold no weights",))

    def _describe(self) -> tuple[RankOffer | None, str]:
        """Return this rank's part if it has changed, and why there is none if it cannot be shared."""
        assert self._shards is not None
        try:
            return self._shards.describe(), ""
        except CannotShare as refusal:
            return None, f"memory of rank {self._session.rank} cannot be shared: {refusal}"

    def _give_up(self, reasons: Sequence[str]) -> None:
        self._shards = None
        if self._through == "ipc":
            raise UsageError(_refuse(reasons))
        if self._session.rank == 0:
            _log.info("engines read published weights from files, not from devices: %s", "; ".join(reasons))


def _refuse(reasons: Sequence[str]) -> str:
    return f"--publish-through ipc cannot be: {'; '.join(reasons)}. Write auto or files"
