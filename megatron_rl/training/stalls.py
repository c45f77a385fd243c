"""Ranks that all compute and get no further: one of them is in a collective that does not end.

A collective's own timeout cannot notice this soon: a rank may wait in one for as long as another waits for a slot. So
every rank says now and then where it is, and rank 0 looks whether anybody got further, or waits for another process.
"""

import collections
import time
from collections.abc import Callable

# What is waited for in these parts of an iteration has a deadline of its own.
_WITH_A_DEADLINE = ("wait", "publish", "evaluate", "save")
# How often a rank says where it is within the time that it may stay there.
TIMES = 20


class Stalls:
    """On rank 0: where every rank was when it last said so, and for how long that has been the same."""

    def __init__(self, most_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_seconds = most_seconds
        self._clock = clock
        self._places: dict[int, tuple[int, str]] = {}
        self._since = clock()

    def heard(self, rank: int, num_steps: int, part: str) -> None:
        """A rank is in this part of an iteration, after so many steps."""
        place = num_steps, part
        if self._places.get(rank) != place or part in _WITH_A_DEADLINE:
            self._since = self._clock()
        self._places[rank] = place

    def find(self) -> str | None:
        """Say that nobody gets further; None if somebody may."""
        if self._clock() - self._since <= self.most_seconds:
            return None
        ranks = collections.defaultdict(list)
        for rank, (_, part) in sorted(self._places.items()):
            ranks[part].append(str(rank))
        where = "; ".join(f"{', '.join(of_part)} in {part}" for part, of_part in ranks.items())
        return (
            f"no rank has got further for {self.most_seconds / 60:g} minutes, and none waits for engines (ranks "
            f"{where}): look at what each does (py-spy dump --pid), and at the network between them; if a micro-batch "
            "takes that long, raise --distributed-timeout-minutes"
        )
