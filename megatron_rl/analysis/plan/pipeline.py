"""A replica's pipeline schedule, as Megatron runs it: 1F1B, or interleaved with virtual stages.

Invariants:

- a stage does one thing at a time, in the order of the schedule, each as soon as its input has arrived;
- a stage that does not compute waits, for a slot's groups or for another stage.
"""

import dataclasses
import functools
from collections.abc import Sequence

from megatron_rl.analysis.plan.costs import TrainerCosts

Step = tuple[bool, int, int]
"""True for a forward pass, the chunk of the model, the micro-batch."""


@functools.lru_cache(maxsize=256)
def order_steps(num_stages: int, num_virtual: int, num_slots: int, stage: int) -> tuple[Step, ...]:
    """Return the steps of a stage, in order."""
    count = num_slots * num_virtual
    together = num_stages * num_virtual

    def place(number: int, is_forward: bool) -> Step:
        if num_virtual == 1:
            return is_forward, 0, number
        chunk = number % together // num_stages
        micro_batch = number // together * num_stages + number % num_stages
        return is_forward, chunk if is_forward else num_virtual - 1 - chunk, micro_batch

    ahead = num_stages - stage - 1
    ahead = ahead if num_virtual == 1 else 2 * ahead + (num_virtual - 1) * num_stages
    ahead = min(ahead, count)
    steps = [place(number, True) for number in range(ahead)]
    for number in range(ahead, count):
        steps += [place(number, True), place(number - ahead, False)]
    steps += [place(number, False) for number in range(count - ahead, count)]
    return tuple(steps)


@dataclasses.dataclass(frozen=True)
class Spent:
    """A stage's seconds by their use, from the start of an update's schedule until its replica is done."""

    busy: float
    first: float
    """Seconds of waiting for the first slot's groups."""
    starved: float
    """Seconds of waiting for later slots, while groups queued for engines."""
    tail: float
    """Seconds of waiting for later slots, after engines ran dry."""
    bubble: float
    """Seconds of waiting for other stages."""


class Pipeline:
    """One run of a replica's schedule. Slots are given in order; `wanted` is the time at which it wants the next."""

    def __init__(self, costs: TrainerCosts, num_stages: int, num_virtual: int, num_slots: int, start: float) -> None:
        self.start = start
        self._costs = costs
        self._num_stages = num_stages
        self._num_virtual = num_virtual
        self._num_slots = num_slots
        self._orders = [order_steps(num_stages, num_virtual, num_slots, stage) for stage in range(num_stages)]
        self._reached = [0] * num_stages
        self._now = [start] * num_stages
        self._busy = [0.0] * num_stages
        self._slots: list[tuple[float, float]] = []
        """For each slot, the arrival of its groups, and the policy's seconds for it, forward and backward."""
        self._waited: list[tuple[float, float]] = []
        """For each slot, the begin and the end of the first stage's wait for it."""
        # By stage, then by step: the time at which the step ended.
        self._ends: list[dict[Step, float]] = [{} for _ in range(num_stages)]
        self.wanted = start
        """The time at which the first stage began to wait for the slot after those that were given."""
        even = (1 - costs.output_share) / (num_stages * num_virtual)
        self._shares = {(stage, chunk): even for stage in range(num_stages) for chunk in range(num_virtual)}
        self._shares[num_stages - 1, num_virtual - 1] += costs.output_share

    def give(self, arrival: float, seconds: float) -> None:
        """Take the next slot: the arrival of its groups, and the policy's seconds for it, forward and backward."""
        self._slots.append((arrival, seconds))
        self._advance()

    @property
    def end(self) -> float:
        """Return when the last stage is done; all slots must have been given."""
        assert all(reached == len(order) for reached, order in zip(self._reached, self._orders, strict=True))
        return max(self._now)

    def spent(self, dry: float) -> list[Spent]:
        """Return the seconds of each stage until the end; from `dry` on no group queued for an engine."""
        end = self.end
        first = self._waited[0][1] - self._waited[0][0]
        starved = sum(max(0.0, min(after, dry) - before) for before, after in self._waited[1:])
        tail = sum(max(0.0, after - max(before, dry)) for before, after in self._waited[1:])
        found = []
        for busy in self._busy:
            # A later stage may have been at work while the first one waited.
            waited = max(0.0, end - self.start - busy - first)
            of_tail = min(tail, waited)
            of_starved = min(starved, waited - of_tail)
            found.append(Spent(busy, first, of_starved, of_tail, waited - of_tail - of_starved))
        return found

    def _advance(self) -> None:
        """Make all steps that are possible with the slots that were given."""
        is_moving = True
        while is_moving:
            is_moving = False
            for stage in range(self._num_stages):
                while self._reached[stage] < len(self._orders[stage]) and self._try(stage):
                    is_moving = True

    def _try(self, stage: int) -> bool:
        """Make the next step of a stage, if the time of its input is known; return True if it was made."""
        step = self._orders[stage][self._reached[stage]]
        is_forward, chunk, micro_batch = step
        now = self._now[stage]
        if is_forward and stage == 0 and chunk == 0:
            if micro_batch == len(self._slots):
                self.wanted = now
                return False
            ready = self._slots[micro_batch][0]
            self._waited.append((now, max(now, ready)))
        else:
            needed = self._needed(stage, step)
            if needed is None:
                return False
            ready = needed
        forward, backward = self._seconds(micro_batch, self._shares[stage, chunk])
        seconds = forward if is_forward else backward
        end = max(now, ready) + seconds
        self._now[stage] = end
        self._busy[stage] += seconds
        self._ends[stage][step] = end
        self._reached[stage] += 1
        return True

    def _needed(self, stage: int, step: Step) -> float | None:
        """Return when a step's input from another stage arrives; None if that is not known yet."""
        is_forward, chunk, micro_batch = step
        last = self._num_stages - 1
        if is_forward:
            before = (stage - 1, chunk) if stage else (last, chunk - 1)
            end = self._ends[before[0]].get((True, before[1], micro_batch))
        elif stage == last and chunk == self._num_virtual - 1:
            return self._ends[stage].get((True, chunk, micro_batch))
        else:
            after = (stage + 1, chunk) if stage < last else (0, chunk + 1)
            end = self._ends[after[0]].get((False, after[1], micro_batch))
        return None if end is None else end + self._costs.exchange * (self._num_stages > 1)

    def _seconds(self, micro_batch: int, share: float) -> tuple[float, float]:
        costs = self._costs
        policy = self._slots[micro_batch][1] * share
        backward = policy * costs.backward_share
        return (policy - backward) * (1 + costs.num_frozen), backward


def slot_seconds(costs: TrainerCosts, tokens: float, pairs: float) -> float:
    """Return the policy's seconds for a micro-batch, forward and backward, through all stages."""
    return costs.per_micro_batch + tokens * costs.per_token + pairs * costs.per_pair


def count_slot(groups: Sequence[tuple[int, Sequence[int]]], is_shared: bool) -> tuple[int, int]:
    """Count a micro-batch's tokens, and the pairs of a token and one that it sees."""
    tokens = pairs = 0
    for prompt, lengths in groups:
        copies = 1 if is_shared else len(lengths)
        tokens += copies * prompt
        pairs += copies * (prompt * (prompt + 1) // 2)
        for length in lengths:
            tokens += length
            pairs += length * (prompt + (length + 1) // 2)
    return tokens, pairs
