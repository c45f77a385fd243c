"""How far another process's clock is from this one's, from questions and answers."""

import dataclasses
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A question and its answer: the clock of who asked, at both, and the other clock in between."""

    asked: float
    told: float
    answered: float


@dataclasses.dataclass(frozen=True)
class Offset:
    """What to add to this process's clock for the other one; it is wrong by no more than `error`."""

    seconds: float
    error: float

    def back(self) -> "Offset":
        """Return what to add to the other clock for this one."""
        return Offset(-self.seconds, self.error)


def estimate(exchanges: Iterable[Exchange]) -> Offset:
    """Return the offset by the fastest answer: the other clock was read between question and answer."""
    best = min(exchanges, key=lambda exchange: exchange.answered - exchange.asked)
    middle = (best.asked + best.answered) / 2
    return Offset(best.told - middle, (best.answered - best.asked) / 2)


def ask(clock: Callable[[], float], other: Callable[[], float], count: int) -> list[Exchange]:
    """Ask for the other clock so many times."""
    return [Exchange(clock(), other(), clock()) for _ in range(count)]
