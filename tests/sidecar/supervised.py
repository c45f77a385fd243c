"""A supervisor over fake engines, for the length of a test."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

from megatron_rl.shared.protocol.wire import ProbeAnswer
from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.publication import AwaitAnswer, StepDeadlines
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from tests.sidecar.fake_engines import FakeFactory

QUICK = StepDeadlines(*[0.2] * 7)
CONFIG = SupervisorConfig(watch_seconds=0.02, first_pause=0.01, longest_pause=0.05, max_failures=3, deadlines=QUICK)


@contextlib.asynccontextmanager
async def supervised(
    factory: FakeFactory, num_engines: int = 2, config: SupervisorConfig = CONFIG, **changes: Any
) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(factory, dataclasses.replace(config, **changes))
    await supervisor.start(num_engines)
    try:
        yield supervisor
    finally:
        await supervisor.close()


async def until(condition, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def states(factory: FakeFactory) -> set[EngineState]:
    return {made[-1].state for made in factory.made.values()}


def num_made(factory: FakeFactory) -> list[int]:
    """Count the engines that were made under each name: more than one if it was restarted."""
    return [len(made) for made in factory.made.values()]


def hold_groups(factory: FakeFactory) -> None:
    """Let groups stay in flight until `let_go`."""
    for made in factory.made.values():
        made[-1].blocked = asyncio.Event()


def let_go(factory: FakeFactory) -> None:
    for made in factory.made.values():
        made[-1].blocked.set()


def given(answer: ProbeAnswer) -> AwaitAnswer:
    async def give() -> ProbeAnswer:
        return answer

    return give
