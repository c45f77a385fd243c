"""Futures, and the order of requests: those of one model take effect by their numbers, each once."""

import asyncio
import dataclasses
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from megatron_rl.errors import MegatronRLError

_log = logging.getLogger(__name__)
JSON = "application/json"
_MOST_REPEATED = 1 << 10
"""The last requests of a model whose repetition has their answer."""
MOST_KNOWN = 1 << 14
"""Futures whose answers are kept: a client asks again for an answer that was lost on its way."""


@dataclasses.dataclass(frozen=True)
class Body:
    """A result as its client gets it."""

    body: bytes
    media_type: str = JSON


@dataclasses.dataclass
class Future:
    """A request that was accepted; its answer comes later, and may be read again."""

    identity: str
    owner: str
    answer: Body | None = None
    is_noted: bool = False
    done: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    def give(self, answer: Body) -> None:
        """Answer, unless an earlier life of the service has."""
        if self.answer is None:
            self.answer = answer
            self.done.set()


def to_json(value: object) -> Body:
    return Body(msgspec.json.encode(value))


def to_failure(error: BaseException) -> Body:
    """Return the answer to a request that cannot be done; its client raises it, and does not repeat it."""
    if isinstance(error, MegatronRLError):
        return to_json({"error": str(error), "category": "user"})
    _log.error("a request failed", exc_info=error)
    return to_json({"error": f"the service failed: {error!r}; its log has the traceback", "category": "server"})


Perform = Callable[[], Awaitable[Body]]


class Futures:
    """All futures of a service."""

    def __init__(self, note: Callable[[Future], None]) -> None:
        """Make it; `note` writes an answer down, before its client can read it."""
        self.known_answers: Mapping[str, Body] = {}
        """The answers of an earlier life, by the names of their futures."""
        self._note = note
        self._numbers = itertools.count()
        self._mark = secrets.token_hex(4)
        self._known: dict[str, Future] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, owner: str, perform: Perform, name: str | None = None) -> Future:
        """Begin to do a request, next to others."""
        future = self.make(owner, name)
        task = asyncio.create_task(self.perform(future, perform))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return future

    def make(self, owner: str, name: str | None = None) -> Future:
        """Make a future; one with a name is that of a request in the journal."""
        future = Future(name or f"{self._mark}-{next(self._numbers)}", owner, is_noted=name is not None)
        self._known[future.identity] = future
        if future.identity in self.known_answers:
            future.give(self.known_answers[future.identity])
        if len(self._known) > MOST_KNOWN:
            oldest = next((name for name, one in self._known.items() if one.done.is_set()), None)
            self._known.pop(oldest or "", None)
        return future

    async def perform(self, future: Future, perform: Perform) -> None:
        try:
            answer = await perform()
        except Exception as error:
            answer = to_failure(error)
        if future.answer is None and future.is_noted:
            self._note(dataclasses.replace(future, answer=answer))
        future.give(answer)

    def find(self, identity: str, owner: str) -> Future | None:
        future = self._known.get(identity)
        return future if future is not None and future.owner == owner else None


class ModelLine:
    """The requests of one model, which begin to take effect when all before have."""

    def __init__(self, futures: Futures, owner: str) -> None:
        self._futures = futures
        self._owner = owner
        self._by_number: dict[int, Future] = {}
        self._waiting: dict[int, Perform] = {}
        self.next = 1
        """The number of the request that takes effect next."""
        self._task: asyncio.Task[None] | None = None
        self.wait: Callable[[], Awaitable[object]] | None = None
        """Waits until the model is made."""

    def start_after(self, number: int) -> None:
        """Take the requests up to this number as done: a checkpoint has their effect."""
        self.next = number + 1

    def add(self, number: int, perform: Perform, name: str | None = None) -> Future:
        """Take a request of this number, counted from 1; a repeated one changes nothing."""
        if number not in self._by_number:
            future = self._futures.make(self._owner, name)
            if number < self.next:
                future.give(to_failure(MegatronRLError(f"request {number} has taken effect long ago")))
                return future
            self._by_number[number] = future
            self._waiting[number] = perform
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
        return self._by_number[number]

    async def _run(self) -> None:
        if self.wait is not None:
            await self.wait()
        while (perform := self._waiting.pop(self.next, None)) is not None:
            await self._futures.perform(self._by_number[self.next], perform)
            self._by_number.pop(self.next - _MOST_REPEATED, None)
            self.next += 1

    def end(self, reason: str) -> None:
        """Fail what waits for a request that never came."""
        for number in [*self._waiting]:
            del self._waiting[number]
            self._by_number[number].give(to_failure(MegatronRLError(reason)))
