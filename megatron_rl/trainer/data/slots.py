"""The rollout-consumer data loader: the micro-batches of an iteration, given to Megatron's schedules as they come.

Every rank has its own loader and takes the slots of its replica; all ranks of a replica get the same bytes. A rank
reads its next micro-batch inside the schedule, and `next()` blocks there until the slot has arrived. Invariants:

- a rank asks for its slots in order, `num_ahead` ahead of the one that it computes;
- a batch is made when it is the next one, and released when every pass that has begun has had it. So the device holds
  the batches between the first pass and the last, and one ahead;
- a batch takes one copy, for which the host does not wait (`device_copier.py`);
- a pass that begins later makes the same batch again from the slot, which stays on the host;
- tokens that were not sampled from this version are refused here too, whatever the sidecar has checked.
"""

import collections
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol.provenance import tag_version
from megatron_rl.shared.protocol.slots import Division
from megatron_rl.shared.protocol.turns import find_span_problems
from megatron_rl.shared.protocol.wire import Slot
from megatron_rl.trainer.data.batch import Batch, Batcher, BatchFacts
from megatron_rl.trainer.data.device_copier import DeviceCopier

FetchSlot = Callable[[int], Slot]
"""Function that waits for the slot of an index and returns it."""


class SlotRefused(MegatronRLError):
    """A slot holds a response that was not sampled from this version: the whole slot is refused."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """The run, version and fingerprint that all responses of an iteration must be sampled with."""

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
        copier: DeviceCopier,
        waiting: Callable[[int], AbstractContextManager] = nullcontext,
        num_ahead: int = 1,
        leave: Callable[[], None] = lambda: None,
        max_turns: int = 0,
    ):
        """Start to fetch slots; `waiting` makes a context, from the slot's index, in which the rank waits for a slot.

        One thread calls `fetch`, in the order of slots, and at last `leave`.
        """
        self.division = division
        self._fetch = fetch
        self._leave = leave
        self._batcher = batcher
        self.identity = identity
        self._copier = copier
        self._waiting = waiting
        self._num_ahead = num_ahead
        self._max_turns = max_turns
        self._slots: list[Future[Slot]] = [Future() for _ in range(len(self))]
        self._num_asked = 0
        self._is_closed = False
        self._changed = threading.Condition()
        # The thread may wait for a slot that never arrives, and must not keep the process alive.
        self._fetching = threading.Thread(target=self._fetch_in_order, name="slots", daemon=True)
        self._executor = ThreadPoolExecutor(1, "batches")
        self._made: dict[int, Future[Batch]] = {}
        """Batches that a pass has asked for or will ask for next."""
        self._alive: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
        self._facts: dict[int, BatchFacts] = {}
        self._fetching.start()

    def __len__(self) -> int:
        return self.division.slots_per_replica

    def batch(self, index: int) -> Batch:
        """Wait for a batch, and have the next one made meanwhile; the current queue waits for its copy."""
        self._ask_up_to(index + self._num_ahead)
        made = self._begin(index)
        if index + 1 < len(self):
            self._begin(index + 1)
        with self._waiting(index):
            batch = made.result()
        batch.arrival.wait()
        return batch

    def release(self, index: int) -> None:
        """Drop our reference to a batch; the batch is freed when its last user drops it."""
        with self._changed:
            self._made.pop(index, None)

    def select_update(self, update: int) -> "UpdateSlots":
        first = update * self.division.slots_per_update
        return UpdateSlots(self, range(first, first + self.division.slots_per_update))

    def select_after(self, update: int) -> "UpdateSlots":
        return UpdateSlots(self, range((update + 1) * self.division.slots_per_update, len(self)))

    def list_facts(self, indices: range | None = None) -> list[BatchFacts]:
        """Return the facts of these batches, or else of all; each must have been made."""
        return [self._facts[index] for index in (range(len(self)) if indices is None else indices)]

    def wait_for_all(self) -> None:
        """Wait until every slot has arrived."""
        for index, slot in enumerate(self._slots):
            self._ask_up_to(index + self._num_ahead)
            with self._waiting(index):
                slot.result()

    def close(self) -> None:
        """Ask for no more slots."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def finish(self) -> None:
        """Close, and wait until `leave` has returned."""
        self.close()
        self._fetching.join()

    def _ask_up_to(self, last: int) -> None:
        with self._changed:
            assert not self._is_closed, "the slots are closed"
            self._num_asked = max(self._num_asked, min(last + 1, len(self)))
            self._changed.notify()

    def _fetch_in_order(self) -> None:
        try:
            for index in range(len(self)):
                with self._changed:
                    self._changed.wait_for(functools.partial(self._may_fetch, index))
                    if self._is_closed:
                        return
                try:
                    slot = self._fetch(index)
                except BaseException as error:
                    for later in range(index, len(self)):
                        self._settle(later, error)
                    return
                try:
                    check_slot(slot, self.identity, self._max_turns)
                except BaseException as error:
                    self._settle(index, error)
                else:
                    self._settle(index, slot)
        finally:
            self._leave()

    def _may_fetch(self, index: int) -> bool:
        return self._is_closed or self._num_asked > index

    def _settle(self, index: int, outcome: Slot | BaseException) -> None:
        with self._changed:
            if isinstance(outcome, BaseException):
                self._slots[index].set_exception(outcome)
            else:
                self._slots[index].set_result(outcome)
            if (made := self._made.get(index)) is not None:
                self._make_soon(index, made)

    def _begin(self, index: int) -> Future[Batch]:
        """Have a batch made as soon as its slot has arrived, unless the batch exists."""
        with self._changed:
            if (known := self._made.get(index)) is not None:
                return known
            made = self._made[index] = Future()
            if (alive := self._alive.get(index)) is not None:
                made.set_result(alive)
            elif self._slots[index].done():
                self._make_soon(index, made)
        return made

    def _make_soon(self, index: int, made: Future[Batch]) -> None:
        if not self._is_closed:
            self._executor.submit(self._make, index, made)

    def _make(self, index: int, made: Future[Batch]) -> None:
        try:
            batch = self._batcher.batch(self._slots[index].result()).copy_to_device(self._copier)
            with self._changed:
                self._alive[index] = batch
                self._facts[index] = batch.facts
            made.set_result(batch)
        except BaseException as error:
            made.set_exception(error)


class UpdateSlots:
    """The micro-batches of one run of the schedule, or of several consecutive ones."""

    def __init__(self, slots: IterationSlots, indices: range):
        self._slots = slots
        self.indices = indices
        self._num_passes = 0
        self._num_given: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass. A batch is released when all passes that have begun have had it."""
        self._num_passes += 1
        return self._pass()

    @property
    def facts(self) -> list[BatchFacts]:
        """Facts of the batches, each of which must have been made."""
        return self._slots.list_facts(self.indices)

    def wait_for_first(self) -> None:
        """Wait for the first slot before the schedule starts, so that no rank waits for this one in a collective."""
        self._slots.batch(self.indices[0])

    def _pass(self) -> Iterator[Batch]:
        for index in self.indices:
            batch = self._slots.batch(index)
            self._num_given[index] += 1
            if self._num_given[index] == self._num_passes:
                self._slots.release(index)
            yield batch
            del batch


def check_slot(slot: Slot, identity: Identity, max_turns: int = 0) -> None:
    """Raise SlotRefused unless every token of every response was sampled from the weights of this version.

    With `max_turns`, an environment may have written between the policy's turns.
    """
    name = f"slot ({slot.replica}, {slot.index}) of iteration {identity.version}"
    found = Identity(slot.run, slot.version, slot.fingerprint)
    if found != identity:
        raise SlotRefused(f"{name} belongs to {found}, wanted {identity}")
    tag = tag_version(identity.version)
    for part in slot.parts:
        for response in part.responses:
            problems = [*find_span_problems(response, tag, max_turns, len(part.prompt_tokens) // 4)]
            if response.fingerprint != identity.fingerprint:
                problems.append(f"its weights are {response.fingerprint[:12]}, wanted {identity.fingerprint[:12]}")
            if problems:
                raise SlotRefused(
                    f"{name} holds a response of engine {response.engine} to prompt {part.prompt_index} that was not "
                    f"sampled from this version: {problems[0]}"
                )
