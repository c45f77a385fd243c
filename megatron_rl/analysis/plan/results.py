"""The devices' time in a simulated run, by part. Invariant: the parts of a ledger add up to the iteration's seconds."""

import dataclasses
from collections.abc import Sequence

from megatron_rl.sidecar.in_flight.forecast import Opening

# "bubble" includes the wait for other replicas.
TRAINER_PARTS = ("busy", "first", "starved", "tail", "publish", "bubble", "update", "switch", "other")
# Here an engine is busy while it samples anything, and "tail" is its idle time while others still sample.
ENGINE_PARTS = ("busy", "tail", "idle", "publish", "switch", "other")


@dataclasses.dataclass(frozen=True)
class IterationResult:
    """An iteration as it was simulated. The ledgers are means over ranks, and over engines."""

    start: float
    end: float
    trainer: dict[str, float]
    engines: dict[str, float]
    generation: float
    """Seconds from the submission of its prompts to its last group."""
    tokens: int
    """Tokens that passed the policy, forward and backward."""
    staleness: int = 0
    """The age of its oldest group, in updates."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Result:
    """A simulated run."""

    iterations: Sequence[IterationResult]
    num_devices: int
    num_events: int
    opening: Opening | None = None
    """The responses that engines are given at once, if that was chosen."""

    @property
    def seconds(self) -> float:
        """Return an iteration's mean seconds."""
        return sum(one.seconds for one in self.iterations) / len(self.iterations)

    @property
    def tokens(self) -> float:
        """Return an iteration's mean number of tokens."""
        return sum(one.tokens for one in self.iterations) / len(self.iterations)

    @property
    def tpspd(self) -> float:
        """Return the trained tokens per second and device."""
        return self.tokens / self.seconds / self.num_devices

    def mean(self, of_engines: bool = False) -> dict[str, float]:
        """Return the mean ledger of the trainer's ranks, or of the engines."""
        ledgers = [one.engines if of_engines else one.trainer for one in self.iterations]
        return {name: sum(ledger[name] for ledger in ledgers) / len(ledgers) for name in ledgers[0]}
