"""What the sidecar asks of an engine. The other modules: the scripted engine, and the pool that spreads groups."""

import asyncio
import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.errors import MegatronRLError
from megatron_rl.protocol.wire import EngineKind, Response, Sampling, Weights


class EngineState(enum.StrEnum):
    """How far an engine is between its start and its end."""

    STARTING = "starting"
    WAITING = "waiting"
    """It is up and holds no version of this run yet: the next publish brings one."""
    READY = "ready"
    PUBLISHING = "publishing"
    DIRTY = "dirty"
    """A publish broke off: it is not known which weights it holds."""
    DEAD = "dead"


class RefusalCode(enum.StrEnum):
    """Reasons why an engine's worker refused a call, as they travel between processes: classes may be renamed."""

    REFUSED = "refused"
    NOT_WRITTEN = "not written"
    WRONG_WEIGHTS = "wrong weights"


class EngineLost(MegatronRLError):
    """The engine's process is gone, or does not answer within its deadline."""


class EngineRefused(MegatronRLError):
    """The engine answered and refused the request."""


class EngineBusy(EngineRefused):
    """The engine takes no requests for now, as while it is paused; it sampled nothing of this one."""


class WeightsNotWritten(EngineRefused):
    """The trainer ended before it had written all weights."""


class NotCompared(EngineRefused):
    """Parameters of the engine cannot be compared with what was published, and the run accepts no weaker proof."""


class WrongWeights(EngineRefused):
    """The engine was proved not to hold the version that it reports: nothing may be sampled with it."""


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """One group to sample: K responses to one prompt under one version."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    group_size: int
    seed: int
    sampling: Sampling
    can_wait: bool = False
    """Whether other groups go first: an evaluation uses what training leaves free."""
    cut: asyncio.Event | None = dataclasses.field(default=None, compare=False)
    """Once it is set, responses end where they are, some perhaps before their first token."""
    prompt: int = 0
    """The prompt's index, for the trace."""
    since: float | None = None
    """When the group was submitted, for the trace."""


@dataclasses.dataclass(frozen=True)
class WeightReport:
    """What an engine reports of the weights it holds."""

    version: int
    fingerprint: str
    """Made of the digests of the tensors that it loaded."""
    num_compared: int = dataclasses.field(default=0, compare=False)
    """How many parameters were proved to hold, bit for bit, what was published."""
    num_parameters: int = dataclasses.field(default=0, compare=False)
    uncompared: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The parameters that could not be compared, and the tensors that none of the compared ones holds."""


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """What an engine answers to a probe."""

    log_probs: list[float]
    """At temperature 1, of the prompt's tokens from the second on."""
    response: Response
    """One token after the prompt; its spans name the weights that sampled it."""


class Engine(Protocol):
    """One vLLM server, or its stand-in in tests."""

    name: str
    state: EngineState

    @property
    def kind(self) -> EngineKind:
        """How the engine computes log-probs."""
        ...

    async def generate(self, request: GroupRequest) -> list[Response]:
        """Sample a group without scoring it; raise EngineLost or EngineRefused. Cancelling aborts the group."""
        ...

    async def pause(self) -> None:
        """Stop taking steps; nothing is in flight when this returns."""
        ...

    async def load(self, weights: Weights) -> WeightReport:
        """Check digests and completeness, load, and compare what the parameters hold with what was published.

        The engine is DIRTY from the call until `commit`. Raise WrongWeights if it holds something else.
        """
        ...

    async def commit(self, report: WeightReport) -> None:
        """Reset the prefix cache and tag the engine with the version and the fingerprint it reported."""
        ...

    async def verify(self) -> WeightReport:
        """Return the engine's tag, as a report."""
        ...

    async def probe(self, tokens: Sequence[int]) -> ProbeReport:
        """Take steps again, and answer a prompt of these tokens, cut to the engine's longest sequence.

        Without tokens the engine draws some from its version.
        """
        ...

    def open(self) -> None:
        """Become READY and take groups."""
        ...

    async def find_fault(self) -> str | None:
        """Say why the engine is lost; None while its processes run and it answers in time."""
        ...

    def last_words(self) -> str:
        """Say what is known of why it ended."""
        ...
