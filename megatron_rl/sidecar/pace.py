"""How long things have taken lately, and so how long they may take."""

import collections

NUM_KEPT = 8
FACTOR = 10.0
LEAST_SECONDS = 30.0


class Pace:
    """Deadlines that follow from measured durations.

    Invariants:

    - what was never measured has the whole time that its configuration gives it;
    - what was measured has FACTOR times the longest of its last NUM_KEPT durations, at least LEAST_SECONDS, and never
      more than its configuration gives it;
    - a duration that was cut off by its deadline counts as measured, so what is only slow has more time when it is
      tried again.
    """

    def __init__(self, least_seconds: float = LEAST_SECONDS) -> None:
        self._least_seconds = least_seconds
        self._kept: dict[str, collections.deque[float]] = {}

    def note(self, what: str, seconds: float) -> None:
        """Remember how long something has taken."""
        self._kept.setdefault(what, collections.deque(maxlen=NUM_KEPT)).append(seconds)

    def deadline(self, what: str, most_seconds: float, longest: float = 0.0) -> float:
        """Return the seconds that something may take; `longest` is a duration that is not remembered yet."""
        kept = [*self._kept.get(what, ()), *filter(None, [longest])]
        if not kept:
            return most_seconds
        return min(most_seconds, max(self._least_seconds, FACTOR * max(kept)))
