"""Pools of code that a test writes, and the proof that they leave no process and no file open."""

import asyncio
import contextlib
import functools
import os
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from megatron_rl.confined.pool import ConfinedPool, PoolSettings
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.rewards.types import RewardRequest, RewardResult

Pool = TypeVar("Pool", bound=ConfinedPool)


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test that is a coroutine in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def write(folder: Path, code: str, name: str = "mine.py") -> Path:
    """Write a file with reward functions."""
    file = folder / name
    file.write_text(textwrap.dedent(code))
    return file


def request(
    index: int = 0, completions: Sequence[str] = ("a", "bb"), prompt: Any = "p", **columns: Any
) -> RewardRequest:
    """Build a group whose completions have one id a letter."""
    return RewardRequest(index, prompt, completions, [list(range(len(text))) for text in completions], columns)


async def wait_until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def started(pool: Pool) -> AsyncIterator[Pool]:
    """Start a pool; fail if it leaves a folder or a process once it is closed."""
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
        assert not pool._scratch.exists()
        assert leftovers() == []


@contextlib.asynccontextmanager
async def rewarding(
    specs: Sequence[str], timeout: float = 5, trials: Sequence[RewardRequest] = (), **settings: Any
) -> AsyncIterator[RewardPool]:
    """Start a pool of reward functions; fail if the closed pool leaves a process or an open file."""
    before = open_files()
    try:
        async with started(RewardPool(parse_specs(specs, timeout), PoolSettings(**settings))) as pool:
            await pool.try_on(trials)
            yield pool
    finally:
        # The event loop closes its ends of pipes soon after; what earlier tests left, when Python collects it.
        async with asyncio.timeout(60):
            await wait_until(lambda: open_files().items() <= before.items())


def score(specs: Sequence[str], *requests: RewardRequest, **settings: Any) -> list[RewardResult]:
    """Score all groups at once; a RewardError stands in the place of the group that failed."""

    async def run() -> list[RewardResult]:
        async with rewarding(specs, **settings) as pool:
            return await asyncio.gather(*map(pool.score, requests), return_exceptions=True)

    return asyncio.run(run())


def open_files() -> dict[int, str]:
    """Return this process's open files."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    return found


def leftovers(marker: str | None = None, seconds: float = 60) -> list[str]:
    """Return what is left after `seconds`: this process's workers, and processes whose command line has the marker."""
    marks = [f".worker {os.getpid()} ", *([marker] if marker else [])]
    deadline = time.monotonic() + seconds
    while True:
        lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        left = [line for line in lines if any(mark in line for mark in marks)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
