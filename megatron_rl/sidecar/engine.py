"""What the rest of the sidecar knows of an engine."""

import dataclasses
import enum
from typing import Protocol

from megatron_rl.errors import MegatronRLError
from megatron_rl.rollout.wire import Response, Sampling, Weights


class EngineState(enum.StrEnum):
    """Where an engine is between its start and its end."""

    STARTING = "starting"
    WAITING = "waiting"
    """It is there, and holds no version of this run yet: the next publish brings it one."""
    READY = "ready"
    PUBLISHING = "publishing"
    DIRTY = "dirty"
    """A publish broke off in it: nobody knows what it would sample with."""
    DEAD = "dead"


class EngineLost(MegatronRLError):
    """The engine's process is gone, or does not answer within its deadline."""


class EngineRefused(MegatronRLError):
    """The engine answered, and will not do what was asked."""


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """One group to sample: K responses to one prompt under one version."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    group_size: int
    seed: int
    sampling: Sampling
    can_wait: bool = False
    """Others go first: an evaluation takes what training leaves."""


@dataclasses.dataclass(frozen=True)
class WeightReport:
    """What an engine says of the weights it holds."""

    version: int
    fingerprint: str
    """Digested from what it received, before loading it."""
    is_unchanged: bool = dataclasses.field(default=False, compare=False)
    """Of a load: its parameters are, bit for bit, what they were with another fingerprint."""


class Engine(Protocol):
    """One vLLM server, or what stands in for one in tests."""

    name: str
    state: EngineState

    async def generate(self, request: GroupRequest) -> list[Response]:
        """All responses of a group, unscored; EngineLost or EngineRefused otherwise. Cancelling aborts it."""
        ...

    async def pause(self) -> None:
        """Take no more steps; nothing is in flight when this returns."""
        ...

    async def load(self, weights: Weights) -> WeightReport:
        """Receive, digest, check for completeness and load, and say whether that changed anything.

        The engine is DIRTY from the call until `commit`.
        """
        ...

    async def commit(self, report: WeightReport) -> None:
        """Reset the prefix cache and tag the engine with the version and the fingerprint it reported."""
        ...

    async def verify(self) -> WeightReport:
        """What the engine is tagged with now."""
        ...

    async def probe(self) -> list[float]:
        """Log-probs of a fixed prompt: the same weights give the same numbers."""
        ...

    async def resume(self) -> None:
        """Take steps again."""
        ...

    async def is_alive(self) -> bool:
        """Whether the process is there and answers in time."""
        ...
