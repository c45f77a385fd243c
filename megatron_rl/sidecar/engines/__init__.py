"""What the rest of the sidecar knows of an engine; beside it the scripted one, and which engine samples which group."""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.errors import MegatronRLError
from megatron_rl.protocol.wire import EngineKind, Response, Sampling, Weights


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


class WrongWeights(EngineRefused):
    """The engine says that it holds a version, and it was proved that it does not: nobody may sample with it."""


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
    num_compared: int = dataclasses.field(default=0, compare=False)
    """Of a load: parameters that were proved to hold what was received, bit for bit, on all workers."""
    num_parameters: int = dataclasses.field(default=0, compare=False)


class Engine(Protocol):
    """One vLLM server, or what stands in for one in tests."""

    name: str
    state: EngineState

    @property
    def kind(self) -> EngineKind:
        """What its log-probs may differ by depends on."""
        ...

    async def generate(self, request: GroupRequest) -> list[Response]:
        """All responses of a group, unscored; EngineLost or EngineRefused otherwise. Cancelling aborts it."""
        ...

    async def pause(self) -> None:
        """Take no more steps; nothing is in flight when this returns."""
        ...

    async def load(self, weights: Weights) -> WeightReport:
        """Receive, digest, check for completeness, load, and compare what the parameters hold with what was received.

        The engine is DIRTY from the call until `commit`. WrongWeights where it holds something else.
        """
        ...

    async def commit(self, report: WeightReport) -> None:
        """Reset the prefix cache and tag the engine with the version and the fingerprint it reported."""
        ...

    async def verify(self) -> WeightReport:
        """What the engine is tagged with now."""
        ...

    async def probe(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of a prompt's tokens, from the second on, at temperature 1: of as many as the engine takes.

        Without tokens, of some that the engine chooses by its version.
        """
        ...

    async def resume(self) -> None:
        """Take steps again."""
        ...

    async def is_alive(self) -> bool:
        """Whether the process is there and answers in time."""
        ...
