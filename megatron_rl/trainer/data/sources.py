"""Several sources of prompts, and the order in which they take turns.

Invariants:

- which source is next depends on the number of rows taken from each before, and on the weights alone;
- after any number of rows, each source has given its share of them, at most about one row more or less;
- within a source, rows come as `RowOrder` says, with epochs and rests of their own.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_rl.errors import InputError
from megatron_rl.trainer.data.order import Curriculum, RowOrder


class _PlaceInSources(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: list[dict[str, Any]]
    weights: list[float]
    put_off: list[int]


class MixedOrder:
    """The numbers of the rows to take, from sources that take turns; it has the methods of `RowOrder`."""

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
        state: dict[str, Any] = msgspec.to_builtins(
            _PlaceInSources(sources=sources, weights=self._weights, put_off=self._put_off)
        )
        return state

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
