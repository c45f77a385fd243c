"""The front's end of the work for the ranks: a queue, of which they have one piece at a time.

A piece is handed out again until its result has arrived: a rank may have lost the answer. No rank does it twice, since
each remembers the number of its last one.
"""

import asyncio
import collections

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.tinker import work


class NotDone(MegatronRLError):
    """The ranks could not do a piece of work, for the reason that they give."""


class Ranks:
    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[work.Work, asyncio.Future[work.Result]]] = collections.deque()
        self._out: tuple[work.Assigned, asyncio.Future[work.Result]] | None = None
        self._num_assigned = 0
        self._changed = asyncio.Event()

    async def do(self, wanted: work.Work) -> work.Result:
        """Have the ranks do a piece of work after those that wait; raise NotDone if they cannot."""
        future: asyncio.Future[work.Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((wanted, future))
        self._changed.set()
        # A piece that was handed out is done, even if its request was cancelled.
        result = await asyncio.shield(future)
        if isinstance(result, work.Failed):
            raise NotDone(result.reason)
        return result

    async def take(self, seconds: float) -> work.Assigned | None:
        """Return the piece that has no result yet, or else the next one; None if none comes within the time."""
        deadline = asyncio.get_running_loop().time() + seconds
        while self._out is None:
            if self._waiting:
                wanted, future = self._waiting.popleft()
                self._num_assigned += 1
                self._out = work.Assigned(number=self._num_assigned, work=wanted), future
                break
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                return None
        return self._out[0]

    def give(self, number: int, result: work.Result) -> None:
        """Take a result; one that has arrived before changes nothing."""
        if self._out is None or self._out[0].number != number:
            if number > self._num_assigned:
                raise InputError(f"work {number} was not handed out")
            return
        _, future = self._out
        self._out = None
        if not future.done():
            future.set_result(result)
