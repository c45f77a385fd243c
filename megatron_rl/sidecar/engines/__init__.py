"""The interface of an engine to the sidecar. Beside it: the scripted engine, and the pool that distributes groups."""

import asyncio
import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol.wire import Drafts, EngineKind, Response, Sampling, Way, Weights

if TYPE_CHECKING:
    import httpx


class EngineState(enum.StrEnum):
    """The states of an engine between its start and its end."""

    STARTING = "starting"
    WAITING = "waiting"
    """The engine runs, but holds no version of this run yet: the next publish brings one."""
    READY = "ready"
    PUBLISHING = "publishing"
    DIRTY = "dirty"
    """A publish failed half-way: it is not known which weights the engine holds."""
    DEAD = "dead"


class RefusalCode(enum.StrEnum):
    """Reasons why an engine's worker refused a call, as they travel between processes: classes may be renamed."""

    REFUSED = "refused"
    NOT_WRITTEN = "not written"
    WRONG_WEIGHTS = "wrong weights"


class EngineLost(MegatronRLError):
    """An engine whose process has ended, or that does not answer within its deadline."""


class EngineRefused(MegatronRLError):
    """A request that the engine answered with a refusal."""


class EngineBusy(EngineRefused):
    """A refusal for the moment, for instance while the engine is paused; it sampled no part of the request."""


class WeightsNotWritten(EngineRefused):
    """The end of the trainer before it had written all weights."""


class NotGiven(EngineRefused):
    """A version that was not delivered, or not all of it, to the engine's host. The engine waits for the next one."""


class NotCompared(EngineRefused):
    """Parameters that cannot be compared with the published weights, in a run that accepts no weaker proof."""


class WrongWeights(EngineRefused):
    """A proof that the engine does not hold the version that it reports: it may not sample."""


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """A group to sample: K responses to one prompt under one version."""

    request_id: str
    prompt_tokens: Sequence[int]
    group_size: int
    seed: int
    sampling: Sampling
    can_wait: bool = False
    """Whether other groups go first: an evaluation uses the capacity that training leaves free."""
    cut: asyncio.Event | None = dataclasses.field(default=None, compare=False)
    """The event that ends the responses where they are, some perhaps before their first token."""
    prompt: int = 0
    """The prompt's index, for the trace."""
    since: float | None = None
    """The time when the group was submitted, for the trace."""
    after: str | None = None
    """The engine that sampled the turn before, whose cache has what was said: it goes there, and before new groups."""


@dataclasses.dataclass(frozen=True)
class WeightReport:
    """An engine's report about the weights that it holds."""

    version: int
    fingerprint: str
    """The fingerprint of the digests of the tensors that it loaded."""
    num_compared: int = dataclasses.field(default=0, compare=False)
    """The number of parameters that were proved to hold the published weights, bit for bit."""
    num_parameters: int = dataclasses.field(default=0, compare=False)
    uncompared: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The parameters that could not be compared, and the tensors that no compared parameter holds."""
    quantization: str = dataclasses.field(default="", compare=False)
    """Names of what it quantizes; empty if it computes with the numbers that it is given."""
    through: Way = dataclasses.field(default="files", compare=False)
    """The way in which the weights reached it."""
    reasons: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """The reasons why it took files, if it was offered the devices' memory."""


@dataclasses.dataclass(frozen=True)
class ProbeReport:
    """An engine's answer to a probe."""

    log_probs: list[float]
    """Log-probs at temperature 1 of the prompt's tokens from the second on."""
    response: Response
    """A response of one token; its spans name the weights that sampled it."""


class WeightsPlace(NamedTuple):
    """The folder of a version on the host of an engine."""

    folder: str
    user: int
    """The number of the user who owns it there."""


class EngineHost(Protocol):
    async def answers(self) -> bool:
        """Check whether engines can be started there now."""
        ...

    async def until_back(self) -> None: ...

    def connect(self, address: str, is_ours: bool = True) -> "httpx.AsyncBaseTransport":
        """Make a transport for requests to the engine at this address; `is_ours` if it was not adopted."""
        ...

    async def is_given(self, weights: Weights) -> bool:
        """Check whether a publish of these weights reaches the host; a stream does if the host answers."""
        ...

    async def has_copy(self, weights: Weights) -> bool:
        """Check whether an engine that starts now can load these weights."""
        ...

    async def find_weights(self, weights: Weights) -> tuple[WeightsPlace, ...]:
        """Return the places from which an engine's workers load them, one for each of its hosts."""
        ...

    def explain_not_written(self, weights: Weights, error: WeightsNotWritten) -> EngineRefused:
        """Return the error to raise if an engine finds that parts of these weights will not come."""
        ...

    def is_being_written(self, weights: Weights) -> bool:
        """Check whether parts of these weights may still arrive there."""
        ...


class Engine(Protocol):
    """A vLLM server, or its replacement in tests."""

    name: str
    state: EngineState
    host: EngineHost

    @property
    def kind(self) -> EngineKind:
        """The way in which the engine computes log-probs."""
        ...

    async def generate(self, request: GroupRequest) -> list[Response]:
        """Sample a group without scoring it; raise EngineLost or EngineRefused. Cancelling aborts the group."""
        ...

    async def pause(self) -> None:
        """Stop taking steps; no request is in flight when this returns."""
        ...

    async def sleep(self) -> None:
        """Give the devices to the ranks, with all that the engine holds; the next `load` takes them back."""
        ...

    async def reach(self, weights: Weights) -> None:
        """Check that each worker can connect to the sender of streamed weights; raise EngineRefused if one cannot."""
        ...

    async def load(self, weights: Weights) -> WeightReport:
        """Check digests and completeness, load, and compare the parameters with the published weights.

        The engine is DIRTY from the call until `commit`. Raise WrongWeights if the parameters differ.
        """
        ...

    async def commit(self, report: WeightReport) -> WeightReport:
        """Reset the prefix cache, and tag the engine with the version and the fingerprint that it reported.

        Return what it then holds: the tag that it keeps, which its workers confirm.
        """
        ...

    async def probe(self, tokens: Sequence[int]) -> ProbeReport:
        """Resume taking steps, and answer a prompt of these tokens, cut to the engine's longest sequence.

        Without tokens the engine draws some from its version.
        """
        ...

    def open(self) -> None:
        """Become READY and take groups."""
        ...

    async def count_drafts(self) -> Drafts | None:
        """Count the drafts of tokens since the last version ended; None if it drafts none, or does not answer."""
        ...

    async def find_fault(self) -> str | None:
        """Return why the engine is lost; None while its processes run and it answers in time."""
        ...

    def last_words(self) -> str:
        """Describe what is known about its end."""
        ...
