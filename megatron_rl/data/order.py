"""In which order the rows of a data set are taken, and how far a run has come in it."""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from megatron_rl.errors import InputError


class PlaceInRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many rows were taken, and what identifies the data and order that this number refers to."""

    num_taken: int
    seed: int
    shuffle: bool
    num_rows: int
    fingerprint: str
    put_off: list[int] = []
    """Rows that were taken and are to come again, in this order."""


class RowOrder:
    """The numbers of the rows to take, in an order that is a function of data set, seed and epoch.

    - Every row is taken exactly once per epoch; a take may end one epoch and begin the next.
    - What is taken depends on how many rows were taken before, and not on how many at a time.
    - What was put off when it was taken is kept, in order, until it is asked for.
    - An order that is restored goes on as if it had never been stopped.
    """

    def __init__(self, num_rows: int, fingerprint: str, seed: int, shuffle: bool) -> None:
        """`fingerprint` is that of the rows."""
        assert num_rows
        self.num_rows = num_rows
        self.fingerprint = fingerprint
        self.num_taken = 0
        """Rows taken so far, over all epochs."""
        self._put_off: list[int] = []
        self._seed = seed
        self._shuffle = shuffle
        self._of_epoch = (-1, np.zeros(0, dtype=np.int64))

    @property
    def epochs(self) -> float:
        """How many passes over the data set have been made."""
        return self.num_taken / self.num_rows

    @property
    def num_put_off(self) -> int:
        """How many rows were taken before, and put off."""
        return len(self._put_off)

    def peek(self, count: int, num_carried: int = 0) -> list[int]:
        """The next rows, the first of them put off earlier; the same again until some are taken."""
        rows = self._put_off[:num_carried]
        for number in range(self.num_taken, self.num_taken + count - len(rows)):
            epoch, place = divmod(number, self.num_rows)
            rows.append(int(self._find_order(epoch)[place]))
        return rows

    def advance(self, count: int, num_carried: int = 0, put_off: Sequence[int] = ()) -> None:
        """Count so many as taken; `put_off` are the places, among these, of rows that are to come again."""
        rows = self.peek(count, num_carried)
        self.num_taken += count - num_carried
        self._put_off = self._put_off[num_carried:] + [rows[index] for index in put_off]

    def state(self) -> dict[str, Any]:
        """Plain JSON from which `restore` goes on."""
        state: dict[str, Any] = msgspec.to_builtins(self._place())
        return state

    def restore(self, state: object) -> None:
        """Go on from that state; raise an InputError that says what differs if data set or order are not the same."""
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

    def _place(self) -> PlaceInRows:
        return PlaceInRows(
            num_taken=self.num_taken,
            seed=self._seed,
            shuffle=self._shuffle,
            num_rows=self.num_rows,
            fingerprint=self.fingerprint,
            put_off=self._put_off,
        )

    def _find_order(self, epoch: int) -> np.ndarray:
        if self._of_epoch[0] != epoch:
            order = _shuffled(self.num_rows, self._seed, epoch) if self._shuffle else np.arange(self.num_rows)
            self._of_epoch = (epoch, order)
        return self._of_epoch[1]


def digest_text(text: str) -> bytes:
    """Return 16 bytes that follow from a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of an epoch. Of numpy's generators only RandomState gives the same numbers in every version."""
    words = np.frombuffer(digest_text(f"epoch\0{seed}\0{epoch}"), dtype="<u4")
    return np.random.RandomState(words).permutation(count)
