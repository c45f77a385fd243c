"""The attempts at what may fail, and the deadlines that follow from what earlier ones took.

Of the attempts at what makes a response the outermost come first. They do not multiply: each layer repeats for a reason
that no layer inside it repeats for, and one that gives up ends the iteration. An attempt has the seed of the one before
it, and nothing that was said in it. Outside of all these, `--rollout-env-on-error refill` samples a response that
failed up to three times more, each time with another seed.

Others repeat within one attempt. A reward function is called once more, in a process of its own, if its process had
scored another group before it ended (`rewards.pool`). A reward model on a server is asked three times within the
function's limit (`rewards.ready_made`). Clients of the gateway ask again as they like. A trainer repeats a request
until the sidecar answers it (`shared.protocol.client`): the second one changes nothing.
"""

import collections

GROUP = 3
"""A group that is not as it was asked for is sampled again, all of its responses."""
CONVERSATION = 8
"""A conversation or rollout that others in its process may have ended begins again; at last in a process of its own."""
SILENT_ROLLOUT = 3
"""A rollout whose agent failed before the policy said a word begins again."""
TURN = 5
"""A response or turn is sampled again at once, on any engine, if its engine was lost or refused it."""
PUBLISH = 3
"""A publish is tried again as a whole, with engines that were lost or refused twice started again."""

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
