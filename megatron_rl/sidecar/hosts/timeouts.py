"""The durations between a service and the agents of its hosts, and the bounds that many hosts share."""

import asyncio
import dataclasses

_CONNECTS_AT_ONCE = 64
"""Some of a thousand at once would be given up before the service gets to them."""
_LEAST_SECONDS_BETWEEN_BEATS = 0.02
"""The same for the beats of all hosts: each takes more than a millisecond of the service."""


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Durations in seconds between a service and an agent."""

    beat: float = 0.5
    """Seconds between two beats."""
    answer: float = 5.0
    """The most seconds for an answer. A link that is cut for less time than this costs nothing but the wait."""
    lost: float = 15.0
    """Seconds without an answer after which a host is lost: longer than a link is cut while a switch restarts."""
    lease: float = 30.0
    """The length of the lease: longer than `lost`, so that the service names a loss before engines are ended."""
    ending: float = 60.0
    """The most seconds for the end of engines, which may have much memory to free."""
    first_pause: float = 1.0
    """Seconds before a lost host is asked again; doubled with each time."""
    longest_pause: float = 30.0


TIMEOUTS = Timeouts()


class HostLimits:
    """The bounds that all hosts of a run share, so that the service has time for each of a hundred."""

    def __init__(self) -> None:
        self.connects = asyncio.Semaphore(_CONNECTS_AT_ONCE)
        """Bounds the connections that are opened at once, for starts and for steps."""
        self.num_hosts = 0
        """The number of the hosts."""

    def find_pause(self, seconds: float) -> float:
        """Return the seconds between two beats of a host: longer than these if there are many hosts."""
        return max(seconds, _LEAST_SECONDS_BETWEEN_BEATS * self.num_hosts)
