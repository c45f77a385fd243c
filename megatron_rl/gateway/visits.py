"""One rollout as an agent sees it, and the interface of what acts in it."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Visit:
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


class AgentFailed(Exception):
    """An agent that raised, died or took too long: the sentence says which."""

    def __init__(self, reason: str, is_to_be_repeated: bool = False) -> None:
        super().__init__(reason)
        self.is_to_be_repeated = is_to_be_repeated
        """True if others may be the cause, so that the rollout begins again."""


class Agents(Protocol):
    """The side that acts in rollouts: a person's function, or a server of other people's environments."""

    @property
    def identity(self) -> str:
        """Everything that is known to decide what they do: groups that others made are made again."""
        ...

    async def start(self) -> None:
        """Make ready to act; raise if this cannot be."""
        ...

    async def act(self, visit: Visit) -> Mapping[str, float]:
        """Act one rollout through the gateway to its end; return rewards by component, or raise AgentFailed."""
        ...

    async def close(self) -> None:
        """End every process that was started."""
        ...
