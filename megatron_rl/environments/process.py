"""The parent's side of a worker of environments: many calls at once, each with its own answer."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.types import EnvironmentFailed, TooSlow, WorkerEnded
from megatron_rl.rewards.process import ConfinedWorker, WorkerFault

_LAST_LOOK_SECONDS = 0.5


class EnvironmentWorker(ConfinedWorker):
    """A worker that holds the environments of some conversations.

    After a call that took too long it is `worn`: it takes no new conversation, and ends after those that it has. If the
    process did not answer at all meanwhile, the call holds Python's lock, and the worker ends with all conversations.
    """

    MODULE = "megatron_rl.environments.worker"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.conversations: set[int] = set()
        self.is_worn = False
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        # The questions whether the process lives that it has not answered.
        self._pings: set[int] = set()
        self._fault: WorkerFault | None = None
        self._reading: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Begin to read answers; the set-up has been answered."""
        self._reading = asyncio.get_running_loop().create_task(self._read_answers())

    async def call(self, content: Mapping[str, Any], timeout: float) -> Any:
        """Make a call and return what the environment says; raise EnvironmentFailed if it fails."""
        number, ping = next(self._numbers), next(self._numbers)
        try:
            line = json.dumps({"id": number, **content}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed(f"a column of the row cannot be passed on as JSON: {error}") from None
        loop = asyncio.get_running_loop()
        waiting = self._waiting[number] = loop.create_future()
        asking = loop.call_later(timeout / 2, self._ask, ping)
        try:
            if self._fault is not None:
                raise WorkerEnded(str(self._fault), had_call=False)
            async with asyncio.timeout(timeout):
                await self._send(line)
                return await asyncio.shield(waiting)
        except TimeoutError:
            # This process's event loop may have stood still: what the worker has answered meanwhile is read now.
            await asyncio.wait([waiting], timeout=min(timeout / 4, _LAST_LOOK_SECONDS))
            if waiting.done():
                return waiting.result()
            self.is_worn = True
            waiting.cancel()
            # In a process of its own, only the call itself can be the cause.
            if ping in self._pings and len(self.conversations) > 1:
                reason = f"its process did not answer for {timeout / 2:g} seconds: a call in it holds Python's lock"
                self._break_off(WorkerFault(reason, False))
                self.kill()
            if self._fault is not None:
                raise WorkerEnded(str(self._fault), had_call=True) from None
            raise TooSlow(f"did not answer {content['call']} within {timeout:g} seconds") from None
        finally:
            asking.cancel()
            self._pings.discard(ping)
            del self._waiting[number]

    async def end(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await super().end()

    def _ask(self, ping: int) -> None:
        """Ask the process whether it lives."""
        # Agents have processes of their own, which share no lock.
        if type(self) is EnvironmentWorker:
            self._pings.add(ping)
            self._write(json.dumps({"id": ping, "call": "ping"}).encode() + b"\n")

    def _break_off(self, fault: WorkerFault) -> None:
        """End all calls for the first fault of the process."""
        if self._fault is not None:
            return
        self._fault, self.is_worn = fault, True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerEnded(str(fault), had_call=True))

    async def _read_answers(self) -> None:
        try:
            while True:
                content = await self._receive()
                self._pings.discard(content.get("id", 0))
                waiting = self._waiting.get(content.get("id", 0))
                # The caller of an answer that comes too late has left.
                if waiting is None or waiting.done():
                    continue
                if "error" in content:
                    waiting.set_exception(EnvironmentFailed(str(content["error"])))
                else:
                    waiting.set_result(content.get("said"))
        except WorkerFault as fault:
            self._break_off(fault)
