"""Parts of a start run at the same time, and of several mistakes the same one is reported, whichever comes first."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.starting import StartParts


class Recorded:
    """Actions that end when they are told to, and note how they ended."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.go: dict[str, asyncio.Event] = {}

    async def act(self, name: str, error: Exception | None = None, is_held: bool = False) -> str:
        self.begun.append(name)
        try:
            if is_held:
                await self.go.setdefault(name, asyncio.Event()).wait()
            if error is not None:
                raise error
        finally:
            self.ended.append(name)
        return name.upper()


def test_all_parts_run_at_once_and_their_results_and_seconds_come_by_name():
    recorded, clock = Recorded(), iter((100.0, 101.0, 104.04))
    parts = StartParts(clock=lambda: next(clock))

    async def run() -> dict[str, str]:
        running = asyncio.create_task(parts.run({"a": recorded.act("a", is_held=True), "b": recorded.act("b")}))
        while recorded.ended != ["b"]:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert recorded.begun == ["a", "b"]
        assert parts.seconds == {"a": None, "b": 1.0}
        recorded.go["a"].set()
        return await running

    assert asyncio.run(run()) == {"a": "A", "b": "B"}
    assert parts.seconds == {"a": 4.0, "b": 1.0}


def test_of_two_errors_the_first_in_the_order_is_raised_though_it_comes_later():
    recorded = Recorded()
    actions: dict[str, Coroutine[Any, Any, str]] = {
        "rewards": recorded.act("rewards", UsageError("a reward"), is_held=True),
        "engines": recorded.act("engines", ValueError("an engine")),
    }

    async def run() -> None:
        running = asyncio.create_task(StartParts().run(actions))
        while recorded.ended != ["engines"]:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not running.done(), "the error of the engines may follow from a mistake in the rewards"
        recorded.go["rewards"].set()
        await running

    with pytest.raises(UsageError, match="a reward"):
        asyncio.run(run())


def test_an_error_is_raised_at_once_if_all_before_it_are_done_and_the_others_end_first():
    recorded = Recorded()
    actions = {
        "rewards": recorded.act("rewards"),
        "flags": recorded.act("flags", UsageError("a flag")),
        "engines": recorded.act("engines", is_held=True),
    }
    with pytest.raises(UsageError, match="a flag"):
        asyncio.run(StartParts().run(actions))
    assert recorded.ended == ["rewards", "flags", "engines"]


def test_parts_that_are_cancelled_have_ended_when_the_cancelled_start_ends():
    recorded = Recorded()

    async def run() -> None:
        running = asyncio.create_task(StartParts().run({name: recorded.act(name, is_held=True) for name in ("a", "b")}))
        while len(recorded.go) < 2:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert sorted(recorded.ended) == ["a", "b"]

    asyncio.run(run())
