"""The portions that may be sent: those whose bytes have been written, or have arrived, here."""

import threading
from collections.abc import Callable, Iterable

from megatron_rl.shared.weights.delivery.messages import Contents

Offer = Callable[[Iterable[int]], None]


class Supply:
    """Portions of a version, by their numbers; they become ready while the version is written or received."""

    def __init__(self, contents: Contents, writer: int | None = None):
        """Supply the portions of one writer, or of all."""
        self.numbers = tuple(
            number for number, portion in enumerate(contents.portions) if writer in (None, portion.writer)
        )
        self._ready: list[int] = []
        self._offers: list[Offer] = []
        self._lock = threading.Lock()
        self._missing: dict[str, int] = {}
        self._users: dict[str, list[int]] = {}
        self._num_unwritten: dict[int, int] = {}
        if writer is not None:
            self._count(contents)

    def subscribe(self, offer: Offer) -> None:
        """Offer all portions that are ready now or later."""
        with self._lock:
            self._offers.append(offer)
            ready = list(self._ready)
        offer(ready)

    def add(self, numbers: Iterable[int]) -> None:
        """Offer portions that have become ready."""
        with self._lock:
            new = list(numbers)
            self._ready += new
            offers = list(self._offers)
        for offer in offers:
            offer(new)

    def note(self, tensor: str, num_elements: int) -> None:
        """Note elements that the writer has written; a portion is ready once all of its tensors are written."""
        self._missing[tensor] -= num_elements
        if self._missing[tensor]:
            return
        ready = []
        for number in self._users[tensor]:
            self._num_unwritten[number] -= 1
            if not self._num_unwritten[number]:
                ready.append(number)
        self.add(ready)

    def _count(self, contents: Contents) -> None:
        for number in self.numbers:
            portion = contents.portions[number]
            self._num_unwritten[number] = len(portion.elements)
            for tensor, num_elements in portion.elements:
                name = contents.tensors[tensor]
                self._missing[name] = self._missing.get(name, 0) + num_elements
                self._users.setdefault(name, []).append(number)
