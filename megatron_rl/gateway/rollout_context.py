"""One rollout as an agent sees it, and the interface of what acts in it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Protocol


class AgentClock:
    """The clock of an agent's own time, which stands still while a call of its rollout is unanswered."""

    def __init__(self) -> None:
        self._num_unanswered = 0
        self._timer: asyncio.Timeout | None = None
        self._left = 0.0

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Raise a TimeoutError within this context once the agent has used these seconds."""
        self._left = seconds
        try:
            async with asyncio.timeout(None) as self._timer:
                self._set_timer()
                yield
        finally:
            self._timer = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self._num_unanswered += 1
        self._set_timer()
        try:
            yield
        finally:
            self._num_unanswered -= 1
            self._set_timer()

    def _set_timer(self) -> None:
        timer, now = self._timer, asyncio.get_running_loop().time()
        if timer is None or timer.expired():
            return
        if (end := timer.when()) is not None:
            self._left = end - now
        timer.reschedule(None if self._num_unanswered else now + self._left)


@dataclasses.dataclass(frozen=True)
class RolloutContext:
    """One rollout for an agent: its row, and the address and key with which it speaks to the policy."""

    row: Mapping[str, Any]
    """The prompt's columns."""
    address: str
    """The gateway's base URL, as http://127.0.0.1:PORT/v1."""
    key: str
    """The rollout's own key, which is refused once the rollout has ended."""
    seed: int
    """A number that depends on the run, iteration, prompt and place in the group."""
    model: str
    """The name under which the gateway serves the policy."""
    clock: AgentClock = dataclasses.field(default_factory=AgentClock)
    """The clock that the limit on the agent's time goes by."""
    run_in: Callable[[int], None] = lambda process: None
    """Function that is told the process of the rollout, if it has one: calls of others are refused from then on."""


class Agents(Protocol):
    """The side that acts in rollouts: a person's function, or a server of other people's environments."""

    @property
    def identity(self) -> str:
        """Everything that is known to decide what they do: groups that others made are made again."""
        ...

    async def start(self) -> Any:
        """Make ready to act; raise if this cannot be."""
        ...

    async def act(self, context: RolloutContext) -> Mapping[str, float]:
        """Act one rollout through the gateway to its end; return rewards by component.

        Raise CallFailed if the agent fails; ProcessEnded, if others may be the cause, so that it begins again.
        """
        ...

    async def close(self) -> None:
        """End every process that was started."""
        ...
