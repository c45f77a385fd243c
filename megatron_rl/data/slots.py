"""The rollout-consumer data loader: the micro-batches of an iteration, given to Megatron's schedules as they come.

Every rank has its own loader and asks for the slots of its replica; all ranks of a replica get the same bytes. `next()`
blocks until the slot is there, inside the schedule, where a rank reads its next micro-batch. Invariants:

- a rank asks for its slots in order, one ahead of the one that is computed;
- a batch is made once, however many chunks and passes use it;
- what was not sampled from this version is refused here too, whatever the sidecar has checked.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch

from megatron_rl.data.batch import Batch, Batcher
from megatron_rl.errors import MegatronRLError
from megatron_rl.protocol.provenance import tag_version
from megatron_rl.protocol.slots import Division
from megatron_rl.protocol.wire import Slot

FetchSlot = Callable[[int], Slot]
"""Waits for the slot of that index."""


class SlotRefused(MegatronRLError):
    """A slot holds a response that was not sampled from this version: nothing of the slot is trained on."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """The run, version and fingerprint that all data of an iteration must have been sampled with."""

    run: str
    version: int
    fingerprint: str


class IterationSlots:
    """The batches of one replica in one iteration."""

    def __init__(
        self,
        fetch: FetchSlot,
        batcher: Batcher,
        division: Division,
        identity: Identity,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager] = nullcontext,
        num_ahead: int = 1,
    ):
        """`waiting` is entered while the rank has nothing to compute."""
        self.division = division
        self._fetch = fetch
        self._batcher = batcher
        self.identity = identity
        self._device = device
        self._waiting = waiting
        self._num_ahead = num_ahead
        # One thread: the order of requests is the order of slots.
        self._executor = ThreadPoolExecutor(1, "slots")
        self._futures: list[Future[Batch]] = []
        self._lock = threading.Lock()
        self.num_given = 0
        """How many of the batches have been given out."""

    def __len__(self) -> int:
        return self.division.slots_per_replica

    def batch(self, index: int) -> Batch:
        """Wait for a batch, and have the next one fetched meanwhile."""
        self._ask_up_to(min(index + self._num_ahead, len(self) - 1))
        with self._waiting():
            batch = self._futures[index].result()
        self.num_given = max(self.num_given, index + 1)
        return batch

    def of_update(self, update: int) -> "UpdateSlots":
        """The slots of one update."""
        first = update * self.division.slots_per_update
        return UpdateSlots(self, range(first, first + self.division.slots_per_update))

    def after(self, update: int) -> "UpdateSlots":
        """The slots of all later updates."""
        return UpdateSlots(self, range((update + 1) * self.division.slots_per_update, len(self)))

    def of_all(self) -> "UpdateSlots":
        """The slots of all updates."""
        return UpdateSlots(self, range(len(self)))

    def wait_for_all(self) -> None:
        """Return when every batch is there."""
        for index in range(len(self)):
            self.batch(index)

    def close(self) -> None:
        """Ask for no more slots."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _ask_up_to(self, last: int) -> None:
        with self._lock:
            for index in range(len(self._futures), last + 1):
                self._futures.append(self._executor.submit(self._make, index))

    def _make(self, index: int) -> Batch:
        slot = self._fetch(index)
        check_slot(slot, self.identity)
        return self._batcher.batch(slot).to(self._device)


class UpdateSlots:
    """The micro-batches of one run of the schedule."""

    def __init__(self, slots: IterationSlots, indices: range):
        self._slots = slots
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        return (self._slots.batch(index) for index in self.indices)

    def wait_for_first(self) -> None:
        """Wait for the first slot before the schedule starts: inside it, a waiting rank holds others in collectives."""
        self._slots.batch(self.indices[0])


def check_slot(slot: Slot, identity: Identity) -> None:
    """Raise SlotRefused unless every token of every response was sampled from the weights of this version."""
    name = f"slot ({slot.replica}, {slot.index}) of iteration {identity.version}"
    found = Identity(slot.run, slot.version, slot.fingerprint)
    if found != identity:
        raise SlotRefused(f"{name} is of {found}, wanted {identity}")
    tag = tag_version(identity.version)
    for part in slot.parts:
        for response in part.responses:
            num_tokens = len(response.tokens) // 4
            spans = [(span.version, span.start) for span in response.spans]
            ends = [span.end for span in response.spans]
            is_whole = spans == [(tag, start) for start in [0, *ends[:-1]]] and ends[-1:] == [num_tokens]
            if response.fingerprint != identity.fingerprint or not is_whole:
                raise SlotRefused(
                    f"{name} holds a response of engine {response.engine} to prompt {part.prompt_index} with spans "
                    f"{spans} of weights {response.fingerprint[:12]}, wanted {num_tokens} tokens of version {tag} of "
                    f"{identity.fingerprint[:12]}"
                )
