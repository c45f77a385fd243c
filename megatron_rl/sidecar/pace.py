"""The latest durations of actions, and the deadlines that follow from them."""

import collections

NUM_KEPT = 8
FACTOR = 10.0
LEAST_SECONDS = 30.0


class Pace:
    """Deadlines that follow from measured durations.

    Invariants:

    - an action that was never measured has the whole time that its configuration gives it;
    - a measured action has FACTOR times the longest of its last NUM_KEPT durations, at least LEAST_SECONDS, and never
      more than its configuration gives it;
    - a duration that was cut off by its deadline counts as measured, so an action that is only slow has more time at
      its next attempt.
    """

    def __init__(self, least_seconds: float = LEAST_SECONDS) -> None:
        self._least_seconds = least_seconds
        self._kept: dict[str, collections.deque[float]] = {}

    def note(self, action: str, seconds: float) -> None:
        self._kept.setdefault(action, collections.deque(maxlen=NUM_KEPT)).append(seconds)

    def deadline(self, action: str, most_seconds: float, longest: float = 0.0) -> float:
        """Return the seconds that an action may take; `longest` is a duration that is not remembered yet."""
        kept = [*self._kept.get(action, ()), *filter(None, [longest])]
        if not kept:
            return most_seconds
        return min(most_seconds, max(self._least_seconds, FACTOR * max(kept)))
