"""The places of a sidecar's engines, each of which has one engine after the other."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megatron_rl.errors import InputError
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.engines import Engine, EngineState

UP = (EngineState.WAITING, EngineState.READY, EngineState.PUBLISHING, EngineState.DIRTY)


class SupervisedEngine(Engine, Protocol):
    """An engine that can be started and ended."""

    stream_place: streams.StreamPlace | None

    @property
    def num_workers(self) -> int: ...

    async def start(self) -> None:
        """Return when the engine answers, in the state WAITING; raise EngineLost if it ends first."""
        ...

    async def close(self) -> None:
        """End the engine, in any state."""
        ...


class EngineFactory(Protocol):
    def create(self, name: str) -> SupervisedEngine: ...

    def adopt(self, name: str, address: str) -> SupervisedEngine: ...

    def release(self, name: str) -> None: ...


@dataclasses.dataclass
class Member:
    """The place of an engine, which another engine takes after a restart."""

    name: str
    engine: SupervisedEngine
    address: str | None = None
    """The socket of an adopted engine, which was started elsewhere."""
    num_failures: int = 0
    num_restarts: int = 0
    started: float = 0.0
    error: str = ""
    down_since: float | None = None
    """The time at which it was lost and stopped taking groups."""
    is_leaving: bool = False
    is_given_up: bool = False
    is_starting: bool = False
    """Whether its task starts an engine at this moment."""
    task: asyncio.Task[None] | None = None
    """The task that starts or restarts it."""
    check: asyncio.Task[None] | None = None


class Members(dict[str, Member]):
    """All places, by name."""

    def __init__(self, factory: EngineFactory) -> None:
        super().__init__()
        self._factory = factory
        self._num_made = 0

    def make(self, address: str | None = None) -> Member:
        """Add a place, whose engine is started or adopted by its own `start`."""
        name = f"engine-{self._num_made}"
        member = self[name] = Member(name, self._create(name, address), address)
        self._num_made += 1
        return member

    async def replace(self, member: Member, reason: str) -> None:
        """End a place's engine and give it another one."""
        member.error = reason
        member.num_restarts += 1
        await member.engine.close()
        member.engine = self._create(member.name, member.address)

    async def forget(self, member: Member) -> None:
        del self[member.name]
        await cancel(member.task, member.check)
        await member.engine.close()
        self._factory.release(member.name)

    async def forget_all(self) -> None:
        """End all places and their engines at the same time."""
        members = list(self.values())
        self.clear()
        await cancel(*(task for member in members for task in (member.task, member.check)))
        await asyncio.gather(*(member.engine.close() for member in members), return_exceptions=True)
        for member in members:
            self._factory.release(member.name)

    async def forget_leaving(self) -> None:
        for member in [member for member in self.values() if member.is_leaving]:
            await self.forget(member)

    def leave(self, name: str) -> None:
        if name not in self:
            raise InputError(f"unknown engine {name!r}: write one of {', '.join(self) or 'none'}")
        self[name].is_leaving = True

    def list_engines(self) -> list[SupervisedEngine]:
        return [member.engine for member in self.values()]

    def list_up(self) -> list[Member]:
        """List the places whose engines answer."""
        return [member for member in self.values() if member.engine.state in UP]

    def withdraw(self) -> None:
        """Keep all engines from taking groups until a publish has succeeded."""
        for engine in self.list_engines():
            if engine.state is EngineState.READY:
                engine.state = EngineState.DIRTY

    def describe_errors(self) -> str:
        """Say of each place what its engine's last error was."""
        return "; ".join(member.error or f"engine {member.name} is {member.engine.state}" for member in self.values())

    def status(self, steps: Mapping[str, tuple[str, float]], in_flight: Callable[[str], int]) -> dict[str, Any]:
        """Return the state of every engine, its step with the seconds so far, and its last error."""
        now = time.monotonic()
        engines = {}
        for name, member in self.items():
            step, since = steps.get(name, (None, now))
            engines[name] = {
                "state": "given up" if member.is_given_up else str(member.engine.state),
                "step": step,
                "step_seconds": round(now - since, 3),
                "in_flight": in_flight(name),
                "restarts": member.num_restarts,
                "leaving": member.is_leaving,
                "adopted": member.address,
                "error": member.error,
            }
        return engines

    def _create(self, name: str, address: str | None) -> SupervisedEngine:
        return self._factory.create(name) if address is None else self._factory.adopt(name, address)


async def cancel(*tasks: asyncio.Task[Any] | None) -> None:
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    for task in running:
        with contextlib.suppress(asyncio.CancelledError):
            await task
