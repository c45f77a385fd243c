"""The order in which the rows of a data set are taken, a run's place in it, and the rows that are held out."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from megatron_rl.config.settings import DataConfig
from megatron_rl.errors import InputError


class PlaceInRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The number of rows that were taken, with the identity of their data and order."""

    num_taken: int
    seed: int
    shuffle: bool
    num_rows: int
    fingerprint: str
    put_off: list[int]
    """Rows that were taken and come again, in this order."""
    num_rested: int
    """Number of rows that were passed over because they rested."""
    resting: list[tuple[int, int]]
    """Rows that rest, each with the last epoch in which it rests."""


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Bounds of the mean reward. A row outside of them rests: it is passed over in the next epochs."""

    least: float
    largest: float
    num_epochs: int


class RowOrder:
    """The numbers of the rows to take, in an order that is a function of data set, seed and epoch.

    - Every row is taken exactly once per epoch, unless it rests; a take may end one epoch and begin the next.
    - A row rests after a reward outside of the curriculum's bounds, for `num_epochs` epochs. Then it is tried again.
    - The next rows depend on the number of rows taken before and on their rewards, not on time.
    - Rows that were put off are kept, in order, until they are asked for.
    - A restored order continues as if it had never been stopped.
    """

    def __init__(
        self, num_rows: int, fingerprint: str, seed: int, shuffle: bool, curriculum: Curriculum | None = None
    ) -> None:
        """Begin with no rows taken; `fingerprint` identifies the rows."""
        assert num_rows
        self.num_rows = num_rows
        self.fingerprint = fingerprint
        self.num_taken = 0
        """Number of rows taken so far, over all epochs."""
        self._put_off: list[int] = []
        self._curriculum = curriculum
        self._num_rested = 0
        self._resting: dict[int, int] = {}
        self._seed = seed
        self._shuffle = shuffle
        self._of_epoch = (-1, np.zeros(0, dtype=np.int64))

    @property
    def epochs(self) -> float:
        """Number of passes over the data set so far."""
        return self._place_of_next / self.num_rows

    @property
    def num_resting(self) -> int | None:
        """Number of rows that rest in the epoch of the next row; None without a curriculum."""
        if self._curriculum is None:
            return None
        epoch = self._place_of_next // self.num_rows
        return sum(last >= epoch for last in self._resting.values())

    @property
    def put_off(self) -> tuple[int, ...]:
        """Rows that were taken and put off, in the order in which they come again."""
        return tuple(self._put_off)

    def peek(self, count: int, num_carried: int = 0) -> list[int]:
        """Return the next `count` rows, beginning with `num_carried` that were put off; do not count them as taken."""
        fresh, _ = self._walk(count - num_carried)
        return self._put_off[:num_carried] + fresh

    def advance(
        self, count: int, num_carried: int = 0, put_off: Sequence[int] = (), rewards: Sequence[float | None] = ()
    ) -> None:
        """Count the next `count` rows as taken; `put_off` are the places, among these, of rows that come again.

        `rewards` are the mean rewards of these rows, in their order; None for a row without a reward.
        """
        fresh, num_rested = self._walk(count - num_carried)
        rows = self._put_off[:num_carried] + fresh
        self.num_taken += count - num_carried
        self._num_rested += num_rested
        self._put_off = self._put_off[num_carried:] + [rows[index] for index in put_off]
        self.learn(rows, rewards)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return msgspec.to_builtins(self._place())

    def restore(self, state: object) -> None:
        """Continue from a state; if the data set or the order differs, raise an InputError that says how."""
        try:
            saved = msgspec.convert(state, PlaceInRows)
        except msgspec.ValidationError as error:
            raise InputError(
                f"the checkpoint's place in the prompts cannot be read: {error}; load another one"
            ) from None
        own = self._place()
        differences = []
        if (saved.num_rows, saved.fingerprint) != (own.num_rows, own.fingerprint):
            differences.append(
                f"other prompts ({saved.num_rows} rows, fingerprint {saved.fingerprint}; now {own.num_rows} rows, "
                f"fingerprint {own.fingerprint}): give the same files, --hf-model, keys, filters and held-out split"
            )
        if saved.seed != own.seed:
            differences.append(f"seed {saved.seed} (now {own.seed}): give --seed {saved.seed}")
        if saved.shuffle != own.shuffle:
            given, todo = (
                ("shuffled prompts", "leave out") if saved.shuffle else ("prompts in the files' order", "give")
            )
            differences.append(f"{given}: {todo} --no-shuffle-prompts")
        if differences:
            raise InputError(
                f"the checkpoint was trained with {'; and with '.join(differences)}; or load its weights alone, with "
                f"--finetune"
            )
        if saved.num_taken < 0:
            raise InputError(f"the checkpoint has taken {saved.num_taken} prompts, which is below 0: load another one")
        strangers = [row for row in saved.put_off if not 0 <= row < self.num_rows]
        if strangers:
            raise InputError(f"the checkpoint has put off row {strangers[0]} of {self.num_rows}: load another one")
        self.num_taken, self._put_off = saved.num_taken, saved.put_off
        self._num_rested = saved.num_rested
        self._resting = {} if self._curriculum is None else dict(saved.resting)

    def _place(self) -> PlaceInRows:
        return PlaceInRows(
            num_taken=self.num_taken,
            seed=self._seed,
            shuffle=self._shuffle,
            num_rows=self.num_rows,
            fingerprint=self.fingerprint,
            put_off=self._put_off,
            num_rested=self._num_rested,
            resting=sorted(self._resting.items()),
        )

    @property
    def _place_of_next(self) -> int:
        """Number of the next row over all epochs; rows that rested count too."""
        return self.num_taken + self._num_rested

    def _walk(self, count: int) -> tuple[list[int], int]:
        """Find the next rows that do not rest, and count the rows that are passed over until the last of them."""
        rows: list[int] = []
        number = self._place_of_next
        while len(rows) < count:
            epoch, place = divmod(number, self.num_rows)
            row = int(self._find_order(epoch)[place])
            if self._resting.get(row, -1) < epoch:
                rows.append(row)
            number += 1
        return rows, number - self._place_of_next - count

    def learn(self, rows: Sequence[int], rewards: Sequence[float | None]) -> None:
        """Let rows rest whose rewards are outside of the curriculum's bounds."""
        if self._curriculum is None:
            return
        # The epoch of the last row that was taken: rows of a take that crosses into an epoch all count for that epoch.
        epoch = (self._place_of_next - 1) // self.num_rows
        for row, reward in zip(rows, rewards, strict=False):
            if reward is not None and not self._curriculum.least <= reward <= self._curriculum.largest:
                self._resting[row] = epoch + self._curriculum.num_epochs
            elif reward is not None:
                self._resting.pop(row, None)

    def _find_order(self, epoch: int) -> np.ndarray:
        if self._of_epoch[0] != epoch:
            order = np.arange(self.num_rows)
            if self._shuffle:
                # RandomState is numpy's only generator with the same numbers in every version.
                words = np.frombuffer(digest_text(f"epoch\0{self._seed}\0{epoch}"), dtype="<u4")
                order = np.random.RandomState(words).permutation(self.num_rows)
            self._of_epoch = (epoch, order)
        return self._of_epoch[1]


def digest_text(text: str) -> bytes:
    """Hash a text into 16 bytes."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Prompted(Protocol):
    """A row of any kind of data."""

    @property
    def row(self) -> str:
        """Identity of the row."""

    @property
    def tokens(self) -> bytes:
        """Tokens of its prompt: rows with the same prompt count as one."""


P = TypeVar("P", bound=Prompted)


class RowSource(Generic[P]):
    """The rows to train on, in the order of `RowOrder`, and those held out."""

    def __init__(
        self,
        rows: Sequence[P],
        held_out: Sequence[P],
        order: "RowOrder | MixedOrder",
        notes: Sequence[str],
        num_read: int | None,
        stops: Sequence[int],
    ) -> None:
        self._rows = list(rows)
        self._held_out = list(held_out)
        self._order = order
        self.num_read = len(self._rows) + len(self._held_out) if num_read is None else num_read
        """Number of rows of all files, including those that are left out."""
        self.notes = tuple(notes)
        """Notes on the data for the user; each is printed once."""
        self.stops = tuple(stops)
        """Tokens that end a response, in addition to those that the model's files list."""

    @property
    def num_rows(self) -> int:
        return len(self._rows)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    @property
    def epochs(self) -> float:
        """Number of passes over the data set so far."""
        return self._order.epochs

    def take(self, count: int) -> list[P]:
        """Return the next rows, and count them as taken."""
        rows = self.peek(count)
        self._order.advance(count)
        return rows

    def peek(self, count: int, num_carried: int = 0) -> list[P]:
        """Return the next rows, and do not count them as taken: see `RowOrder.peek`."""
        return [self._rows[row] for row in self._order.peek(count, num_carried)]

    def held_out(self, limit: int | None = None) -> list[P]:
        """Return the first `limit` of the rows that are never trained on; they are always the same."""
        return self._held_out[:limit]

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as plain JSON."""
        return self._order.state()

    def restore(self, state: object) -> None:
        """Continue from a state; raise an InputError if the data set or the order differs."""
        self._order.restore(state)


def draw_held_out(rows: Sequence[P], count: int, seed: int) -> list[P]:
    """Draw `count` rows by seed and identity alone, so that filters and other rows hardly change the draw."""
    return sorted(rows, key=lambda row: digest_text(f"held out\0{seed}\0{row.row}"))[:count]


def leave_out(
    rows: Sequence[P],
    held_out: Sequence[P],
    config: DataConfig,
    notes: list[str],
    identify: Callable[[P], object] = lambda row: row.tokens,
) -> list[P]:
    """Return the rows to train on: those whose prompts differ from every held-out prompt.

    `identify` returns what two prompts have in common if they are the same.
    """
    same = {identify(row) for row in held_out}
    kept = [row for row in rows if identify(row) not in same]
    num_drawn = 0 if config.eval_prompts else len(held_out)
    num_same = len(rows) - num_drawn - len(kept)
    if not kept:
        split = "--eval-prompts" if config.eval_prompts else f"--prompts-held-out {config.held_out}"
        raise InputError(
            f"{split} of {len(rows)} prompts leaves none to train on, because prompts of the same tokens count as "
            f"one; hold out fewer"
        )
    if num_same:
        are = "is" if num_same == 1 else "are"
        notes.append(f"{num_same} of {len(rows)} prompts {are} the same as held-out ones and left out")
    return kept


class _PlaceInSources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: list[dict[str, Any]]
    weights: list[float]
    put_off: list[int]


class MixedOrder:
    """The numbers of the rows to take, from sources that take turns; it has the methods of `RowOrder`. Invariants:

    - which source is next depends on the number of rows taken from each before, and on the weights alone;
    - after any number of rows, each source has given its share of them, at most about one row more or less;
    - within a source, rows come as `RowOrder` says, with epochs and rests of their own.
    """

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        weights: Sequence[float],
        fingerprint: str,
        seed: int,
        shuffle: bool,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Begin with no rows taken; `members` are the rows of each source."""
        self.fingerprint = fingerprint
        self.num_rows = sum(map(len, members))
        self._members = members
        self._weights = list(weights)
        self._orders = [RowOrder(len(rows), fingerprint, seed, shuffle, curriculum) for rows in members]
        self._places = {row: (source, place) for source, rows in enumerate(members) for place, row in enumerate(rows)}
        self._put_off: list[int] = []

    @property
    def num_taken(self) -> int:
        return sum(order.num_taken for order in self._orders)

    @property
    def epochs(self) -> float:
        return sum(order.epochs * order.num_rows for order in self._orders) / self.num_rows

    @property
    def num_resting(self) -> int | None:
        counts = [count for order in self._orders if (count := order.num_resting) is not None]
        return sum(counts) if counts else None

    @property
    def put_off(self) -> tuple[int, ...]:
        return tuple(self._put_off)

    def peek(self, count: int, num_carried: int = 0) -> list[int]:
        turns = self._choose(count - num_carried)
        rows = [iter(order.peek(turns.count(source))) for source, order in enumerate(self._orders)]
        return self._put_off[:num_carried] + [self._members[source][next(rows[source])] for source in turns]

    def advance(
        self, count: int, num_carried: int = 0, put_off: Sequence[int] = (), rewards: Sequence[float | None] = ()
    ) -> None:
        rows, turns = self.peek(count, num_carried), self._choose(count - num_carried)
        known = dict(zip(rows[num_carried:], rewards[num_carried:], strict=False))
        for source, order in enumerate(self._orders):
            own = order.peek(turns.count(source))
            order.advance(len(own), rewards=[known.get(self._members[source][place]) for place in own])
        for row, reward in zip(rows[:num_carried], rewards, strict=False):
            source, place = self._places[row]
            self._orders[source].learn([place], [reward])
        self._put_off = self._put_off[num_carried:] + [rows[index] for index in put_off]

    def state(self) -> dict[str, Any]:
        sources = [order.state() for order in self._orders]
        return msgspec.to_builtins(_PlaceInSources(sources=sources, weights=self._weights, put_off=self._put_off))

    def restore(self, state: object) -> None:
        try:
            saved = msgspec.convert(state, _PlaceInSources)
        except msgspec.ValidationError:
            raise InputError(self._describe_other("none")) from None
        if saved.weights != self._weights or len(saved.sources) != len(self._orders):
            raise InputError(self._describe_other(", ".join(f"{weight:g}" for weight in saved.weights)))
        for order, own in zip(self._orders, saved.sources, strict=True):
            order.restore(own)
        strangers = [row for row in saved.put_off if row not in self._places]
        if strangers:
            raise InputError(f"the checkpoint has put off row {strangers[0]} of {self.num_rows}: load another one")
        self._put_off = list(saved.put_off)

    def _describe_other(self, saved: str) -> str:
        now = ", ".join(f"{weight:g}" for weight in self._weights)
        return (
            f"the checkpoint was trained with other weights of --prompts ({saved}; now {now}): give the same, or load "
            "its weights alone, with --finetune"
        )

    def _choose(self, count: int) -> list[int]:
        """Choose the sources of the next rows: each time the one whose share lags most (Sainte-Laguë's method)."""
        counts = [order.num_taken for order in self._orders]
        turns = []
        for _ in range(count):
            source = min(range(len(counts)), key=lambda one: ((counts[one] + 0.5) / self._weights[one], one))
            counts[source] += 1
            turns.append(source)
        return turns
