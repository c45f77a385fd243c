"""Demonstrations as packs: those of an update, and those held out. Nothing here depends on time.

Rank 0 has the data, and sends every rank the demonstrations of an update before it begins. Each rank packs those of its
replica: `Division.bound_numbers` says which demonstrations micro-batch j of replica r has.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from megatron_rl.command_line.run import find_pack_multiple
from megatron_rl.config.settings import Settings
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.shared.protocol.slots import Division, Place
from megatron_rl.trainer.data.demonstrations import Demonstration, DemonstrationSource
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.packing import Pack, pack_turns
from megatron_rl.trainer.data.tables import build_preparation
from megatron_rl.trainer.mcore.session import Session


@dataclasses.dataclass(frozen=True)
class Packer:
    """Makes a pack of demonstrations, the same on every rank."""

    copier: DeviceCopier
    multiple_of: int
    """The buffer's length is padded to a multiple of this."""
    vocab_size: int
    num_parts: int
    """The number of ranks that share a pack's rows."""
    prepare: Callable[[Layout], object]
    """Makes the tables that the attention looks up for a layout."""
    packing: Callable[[], AbstractContextManager] = nullcontext
    """Context of the making of a pack, and of giving it to the schedule."""

    def pack(self, demonstrations: Sequence[Demonstration]) -> Pack:
        """Make a pack; without a demonstration it consists of padding."""
        with self.packing():
            sequences = [turns for one in demonstrations for turns in one.sequences]
            pack = pack_turns(sequences, self.multiple_of, self.vocab_size)
            self.prepare(pack.layout)
            if self.num_parts > 1:
                pack = pack.divided(self.num_parts)
            copied, arrival = self.copier.copy(pack, pack.layout)
            arrival.wait()
            return copied


def build_packer(
    settings: Settings, copier: DeviceCopier, packing: Callable[[], AbstractContextManager] = nullcontext
) -> Packer:
    """Build the packer that makes packs as the settings say."""
    return Packer(
        copier,
        find_pack_multiple(settings),
        settings.architecture.vocab_size,
        settings.transformer.context_parallel_size,
        build_preparation(settings, copier.device),
        packing,
    )


class Packs:
    """A replica's micro-batches in one run of the schedule.

    All are made before it, on the thread that computes; each takes one copy, for which the host does not wait.
    """

    def __init__(self, parts: Sequence[Sequence[Demonstration]], packer: Packer):
        self._parts = parts
        self._packer = packer
        self._packs = [packer.pack(part) for part in parts]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Pack]:
        for pack in self._packs:
            with self._packer.packing():
                # Entered for the timeline alone: giving a pack is progress of a long update.
                pass
            yield pack

    @property
    def num_demonstrations(self) -> int:
        return sum(map(len, self._parts))

    @property
    def num_targets(self) -> int:
        """The number of tokens that are trained on."""
        return sum(pack.num_targets for pack in self._packs)

    @property
    def num_computed(self) -> int:
        """The number of tokens that go through the model, padding included."""
        return sum(pack.num_tokens for pack in self._packs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all demonstrations, without padding."""
        return sum(one.num_tokens for part in self._parts for one in part)


class Demonstrations:
    """The data of a run, as one rank takes it."""

    def __init__(self, session: Session, division: Division, packer: Packer, source: DemonstrationSource | None):
        """`source` is rank 0's; on the others it is None."""
        self._session = session
        self._division = division
        self._packer = packer
        self._source = source

    def take(self) -> Packs:
        """Return the packs of the next update."""
        division, replica = self._division, self._session.replica
        count = division.plan.num_prompts
        taken = self._session.broadcast(None if self._source is None else self._source.take(count))
        assert taken is not None
        numbers = [division.bound_numbers(Place(replica, index)) for index in range(division.slots_per_update)]
        return Packs([[taken[number] for number in of_slot] for of_slot in numbers], self._packer)

    @property
    def epochs(self) -> float:
        """The number of passes over the data set so far; on rank 0."""
        assert self._source is not None
        return self._source.epochs


def divide_held_out(
    held_out: Sequence[Demonstration], micro_batch_size: int, session: Session, count_of_turn: int
) -> list[Sequence[Demonstration]]:
    """Divide held-out demonstrations over the replicas; return this one's micro-batches, of which some may be empty.

    Each replica has the same number of them, a multiple of `count_of_turn`, which virtual stages take in turn.
    """
    replicas = session.num_replicas
    parts = [held_out[first : first + micro_batch_size] for first in range(0, len(held_out), micro_batch_size)]
    of_replica = -(-len(parts) // (replicas * count_of_turn)) * count_of_turn
    parts += [()] * (of_replica * replicas - len(parts))
    return parts[session.replica :: replicas]
