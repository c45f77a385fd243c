"""Where the devices' time of an iteration goes. Invariant: the parts of a ledger add up to the iteration's seconds."""

import dataclasses
from collections.abc import Sequence

# "bubble" has the wait for other replicas too.
TRAINER_PARTS = ("busy", "first", "starved", "tail", "publish", "bubble", "update", "switch", "other")
# Here an engine is busy as long as it samples at all, and "tail" is what it idles while others still sample.
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
    """That went through the policy, forward and backward."""
    staleness: int = 0
    """The most updates that a group of it was behind."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class Result:
    """A simulated run."""

    iterations: Sequence[IterationResult]
    num_devices: int
    num_events: int

    @property
    def seconds(self) -> float:
        """Of an iteration, on average."""
        return sum(one.seconds for one in self.iterations) / len(self.iterations)

    @property
    def tokens(self) -> float:
        """Of an iteration, on average."""
        return sum(one.tokens for one in self.iterations) / len(self.iterations)

    @property
    def tpspd(self) -> float:
        """Trained tokens a second a device."""
        return self.tokens / self.seconds / self.num_devices

    def mean(self, of_engines: bool = False) -> dict[str, float]:
        """Return the mean ledger of the trainer's ranks, or of the engines."""
        ledgers = [one.engines if of_engines else one.trainer for one in self.iterations]
        return {name: sum(ledger[name] for ledger in ledgers) / len(ledgers) for name in ledgers[0]}
