"""The protocol between a rollout service and the agent of a host: messages as JSON, durations and bounds.

The routes are in `application.py`. Requests to engines travel in lists, as msgpack, because they have bodies of bytes.

A lease is the right of one service to run engines on a host. It has a name that cannot be guessed, and every request
but the first carries it. Its length is a duration that each side counts on its own steady clock: no time of day is
compared.
"""

import asyncio
import dataclasses
import struct
from collections.abc import Iterator

import msgspec

from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.sidecar.vllm.server import ServerConfig

PROTOCOL = 5
"""The version of these messages and of the routes; an agent refuses a service of another one."""

REQUESTS_ROUTE = "/v1/requests"
LEASE_HEADER = "x-lease"
UNAUTHORIZED = 401

MAX_BODY_BYTES = 1 << 28
LONGEST_LEASE = 600.0
ALIVE_SECONDS = 5.0
"""Some beats: a service that was silent for so long may be followed by one of the same run."""
_CONNECTS_AT_ONCE = 64
"""Some of a thousand at once would be given up before the service gets to them."""
_LEAST_SECONDS_BETWEEN_BEATS = 0.02
"""The same for the beats of all hosts: each takes more than a millisecond of the service."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A service's request for the lease."""

    run: str
    seconds: float
    """The length of the lease: after so long a silence of the service, the agent ends its engines."""
    token: str = ""
    """The secret with which the host and the trainer's ranks know each other when weights are delivered."""
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's answer to a request for the lease."""

    lease: str
    user: int
    """The number of the agent's user, who owns the weights on its host."""
    port: int | None = None
    """The port at which the host takes weights; None if it shares the trainer's folder."""


class EngineStart(msgspec.Struct, frozen=True, kw_only=True):
    config: ServerConfig
    num_workers: int
    """The processes of all engines of this host. On a CPU they share its cores, if the configuration has no threads."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    log: str
    """The file of the engine's output, on its host."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The service's sign of life, which renews the lease."""

    needed: dict[str, list[int]] = {}
    """The processes that each engine needs, if they have become known."""
    num_lines: dict[str, int] = {}
    """The number of lines of each engine's output that the service has seen."""
    version: int | None = None
    """The version of the weights that the service asks about."""


class Life(msgspec.Struct, frozen=True, kw_only=True):
    ended: str | None = None
    """The way in which its server ended; None while it runs."""
    fault: str | None = None
    """The process that has ended or is stopped; None while all run."""
    num_lines: int = 0
    lines: list[str] = []
    """The last of its lines, beginning with the first that the service has not seen."""


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the weights that is arriving on a host, or has arrived."""

    folder: str
    is_being_written: bool
    is_complete: bool
    fingerprint: str = ""
    """The fingerprint of the newest version, and empty for an older one: a former trainer may have used its number."""

    def is_of(self, weights: Weights) -> bool:
        """Check whether it may be these weights, as far as its fingerprint is known."""
        return self.fingerprint in ("", weights.fingerprint)


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a beat: all engines of the lease."""

    engines: dict[str, Life]
    arrived: Arrived | None = None
    """The weights that the service asked about; None if they have not begun to arrive."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an engine's server; a list of them is answered by a stream of EngineAnswer, each with its length."""

    engine: str
    method: str
    path: str
    kind: str
    """The type of its body."""
    body: bytes


class EngineAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to one of several requests."""

    number: int
    """The place of the request in the list."""
    status: int
    kind: str
    body: bytes
    is_fault: bool = False
    """True if the agent answers in place of the engine, which may answer with any status itself."""


_LENGTH = struct.Struct("<I")


def pack(answer: EngineAnswer) -> bytes:
    """Encode an answer, after its length."""
    data = msgspec.msgpack.encode(answer)
    return _LENGTH.pack(len(data)) + data


def unpack(data: bytearray) -> Iterator[EngineAnswer]:
    """Take the answers that have come as a whole off the beginning of the data."""
    while len(data) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        if len(data) < end:
            return
        answer = msgspec.msgpack.decode(bytes(data[_LENGTH.size : end]), type=EngineAnswer)
        del data[:end]
        yield answer


class AgentRefusal(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request that the agent refuses."""

    error: str


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
