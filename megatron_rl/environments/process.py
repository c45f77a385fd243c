"""The parent's side of a worker of environments: many calls at once, each with its own answer."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.types import EnvironmentFailed, TooSlow, WorkerEnded
from megatron_rl.rewards.process import ConfinedWorker, WorkerFault

_LAST_LOOK_SECONDS = 0.5
# A question whether the process lives is asked after each of these shares of a call's time.
_ASKED_EACH = 1 / 8


class EnvironmentWorker(ConfinedWorker):
    """A worker that holds the environments of some conversations.

    After a call that took too long it is `worn`: it takes no new conversation, and ends after those that it has. If the
    process did not answer at all meanwhile, the call holds Python's lock, and the worker ends with all conversations.
    """

    MODULE = "megatron_rl.environments.worker"
    SHARES_LOCK = True
    """Whether conversations share a process, and so its lock."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.conversations: set[int] = set()
        self.is_worn = False
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        # The question whether the process lives that it has not answered, and the time when it was asked.
        self._question: tuple[int, float] | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._fault: WorkerFault | None = None
        self._reading: asyncio.Task[None] | None = None

    def follow(self) -> None:
        """Begin to read answers; the set-up has been answered."""
        self._reading = asyncio.get_running_loop().create_task(self._read_answers())

    async def call(self, content: Mapping[str, Any], timeout: float) -> Any:
        """Make a call and return what the environment says; raise EnvironmentFailed if it fails."""
        number = next(self._numbers)
        try:
            line = json.dumps({"id": number, **content}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise EnvironmentFailed(f"a column of the row cannot be passed on as JSON: {error}") from None
        loop = asyncio.get_running_loop()
        waiting = self._waiting[number] = loop.create_future()
        if self._asking is None and self.SHARES_LOCK:
            self._asking = loop.call_later(_ASKED_EACH * timeout, self._ask, _ASKED_EACH * timeout)
        try:
            if self._fault is not None:
                raise WorkerEnded(str(self._fault), had_call=False)
            async with asyncio.timeout(timeout):
                await self._send(line)
                return await waiting
        except TimeoutError:
            # This process's event loop may have stood still: what the worker has answered meanwhile is read now.
            late = self._renew(number)
            await asyncio.wait([late], timeout=min(timeout / 4, _LAST_LOOK_SECONDS))
            if late.done():
                return late.result()
            self.is_worn = True
            # If it is the only conversation, only the call itself can be the cause.
            silence = 0.0 if self._question is None else loop.time() - self._question[1]
            if silence > timeout / 2 and len(self.conversations) > 1:
                reason = f"its process did not answer for {timeout / 2:g} seconds: a call in it holds Python's lock"
                self._break_off(WorkerFault(reason, False))
                self.kill()
            if self._fault is not None:
                raise WorkerEnded(str(self._fault), had_call=True) from None
            raise TooSlow(f"did not answer {content['call']} within {timeout:g} seconds") from None
        finally:
            del self._waiting[number]

    async def end(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await super().end()

    def _ask(self, seconds: float) -> None:
        """Ask the process whether it lives, and again after these seconds as long as it has calls to answer."""
        self._asking = None
        if not self._waiting or self._fault is not None:
            return
        if self._question is None:
            number = next(self._numbers)
            self._question = number, asyncio.get_running_loop().time()
            self._write(json.dumps({"id": number, "call": "ping"}).encode() + b"\n")
        self._asking = asyncio.get_running_loop().call_later(seconds, self._ask, seconds)

    def _renew(self, number: int) -> asyncio.Future[Any]:
        """Return the future for the answer to a call; a timeout has cancelled the first one."""
        if self._waiting[number].cancelled():
            self._waiting[number] = asyncio.get_running_loop().create_future()
        return self._waiting[number]

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
                number = content.get("id", 0)
                if self._question is not None and number == self._question[0]:
                    self._question = None
                # The caller of an answer that comes too late has left, or is about to look once more.
                if number not in self._waiting or (waiting := self._renew(number)).done():
                    continue
                if "error" in content:
                    waiting.set_exception(EnvironmentFailed(str(content["error"])))
                else:
                    waiting.set_result(content.get("said"))
        except WorkerFault as fault:
            self._break_off(fault)
