"""An offer: where published weights lie in the memory of the trainer's devices, for engines of the same host to copy.

It is a file beside the published tensors. Invariants:

- offered weights do not change before `withdraw_offer` returns;
- `withdraw_offer` returns only when no reader is left in `taken`, and later readers find no offer. The system releases
  the lock of a reader that ends.

So a late reader, as a restarted engine, reads the files.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.platforms.platform import MemoryHandle

OFFER_FILE = "offer"
OFFER_VERSION = 3
_POLL_SECONDS = 0.0005
_NAMESPACES = ("pid", "ipc")


class OfferedPiece(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of a tensor that is seen as a matrix, and the place of its first element in a shared storage."""

    tensor: int
    """The tensor's number in the offer."""
    first_row: int
    first_column: int
    num_rows: int
    num_columns: int
    memory: int
    """The number of the handle among the rank's."""
    first_element: int
    pitch: int
    """The elements from row to row in the storage."""


class RankOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a rank owns."""

    generation: int
    """A number that changes when any of the rank's parameters lies elsewhere than before."""
    handles: list[MemoryHandle]
    pieces: list[OfferedPiece]


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pieces of all ranks, which together cover each tensor once."""

    fingerprint: str
    host: tuple[str, ...]
    """The host of the ranks, as `identify_host` names it."""
    torch: str
    """The version of the ranks' torch, which makes the handles."""
    run: str
    """A number of the run's own: handles of another run are never taken for this one's."""
    dtype: str
    tensors: list[tuple[str, tuple[int, ...]]]
    """The names and shapes."""
    ranks: list[RankOffer]
    other_dtypes: dict[str, str] = {}
    """The dtypes of tensors that have another one."""
    wire: int = OFFER_VERSION


class StillRead(MegatronRLError):
    """Weights cannot be changed, since an engine still copies them."""


def identify_host() -> tuple[str, ...]:
    """Name this boot of the host and this process's namespaces, outside which no process opens its handles."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return (boot, *(os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES))


def write_offer(folder: Path, offer: Offer) -> None:
    """Write an offer into a folder that no reader knows yet, readable by this user alone."""
    path = folder / OFFER_FILE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.msgpack.encode(offer))


def withdraw_offer(folder: Path, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Remove the folder's offer, and wait until no reader is left that has it."""
    path = folder / OFFER_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        path.unlink(missing_ok=True)
        deadline = time.monotonic() + seconds
        while not _lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise StillRead(
                    f"an engine has copied the weights of {folder} from the trainer's devices for {seconds:g} s and "
                    "has not finished: see the engine's log, then resume; --publish-through files avoids this"
                )
            sleep(_POLL_SECONDS)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def taken(folder: Path) -> Iterator[Offer | None]:
    """Read the folder's offer, which holds for this context; None if there is none, or none any more."""
    try:
        descriptor = os.open(folder / OFFER_FILE, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    with os.fdopen(descriptor, "rb") as file:
        # An offer without a name is withdrawn.
        is_held = _lock(descriptor, fcntl.LOCK_SH) and os.fstat(descriptor).st_nlink > 0
        yield _decode(folder, file.read()) if is_held else None


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _decode(folder: Path, data: bytes) -> Offer:
    try:
        offer = msgspec.msgpack.decode(data, type=Offer)
    except msgspec.DecodeError as error:
        raise InputError(f"{folder / OFFER_FILE} cannot be read: {error}") from None
    if offer.wire != OFFER_VERSION:
        raise InputError(
            f"{folder / OFFER_FILE} has version {offer.wire}, and this side reads {OFFER_VERSION}: install the same "
            "megatron_rl on both sides"
        )
    return offer
