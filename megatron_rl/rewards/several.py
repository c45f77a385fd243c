"""Rewards of several kinds at once: functions in confined processes, a process for each classifier, and a judge."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from megatron_rl.rewards.types import RewardRequest, RewardResult


class Scores(Protocol):
    """What scores groups, as a pool of reward functions does."""

    warnings: list[str]

    @property
    def identity(self) -> str: ...

    async def start(self) -> object: ...

    async def close(self) -> None: ...

    async def try_on(self, trials: Sequence[RewardRequest]) -> None: ...

    async def score(self, request: RewardRequest) -> RewardResult: ...


class Rewards:
    """Kinds of rewards that score a group at the same time; their rewards are added in order."""

    def __init__(self, kinds: Sequence[Scores]) -> None:
        self.warnings: list[str] = []
        self._kinds = kinds
        for kind in kinds:
            kind.warnings = self.warnings

    @property
    def identity(self) -> str:
        return " ".join(kind.identity for kind in self._kinds)

    async def start(self) -> None:
        await asyncio.gather(*(kind.start() for kind in self._kinds))

    async def close(self) -> None:
        await asyncio.gather(*(kind.close() for kind in self._kinds))

    async def try_on(self, trials: Sequence[RewardRequest]) -> None:
        for kind in self._kinds:
            await kind.try_on(trials)

    async def score(self, request: RewardRequest) -> RewardResult:
        """Score a group; raise the first RewardError."""
        results = await asyncio.gather(*(kind.score(request) for kind in self._kinds))
        return RewardResult(
            [_add(rewards) for rewards in zip(*(result.rewards for result in results), strict=True)],
            {name: values for result in results for name, values in result.components.items()},
            max(result.seconds for result in results),
            {name: reason for result in results for name, reason in result.errors.items()},
        )


def _add(rewards: Iterable[float | None]) -> float | None:
    """Add up rewards without those that do not apply; None if none applies."""
    known = [reward for reward in rewards if reward is not None]
    return sum(known) if known else None
