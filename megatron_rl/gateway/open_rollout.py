"""A rollout while its agent acts: it answers calls, within its limits, and keeps their record.

Invariants:

- a call whose messages extend those of an answered call is sampled after the very tokens of that call;
- every other call is written from the start, and is a branch where its tokens part from those that are recorded;
- of answers that are equal but for what clients may change, a call extends the one that it sends back, and else the
  same one in every order of arrival;
- seeds follow from the rollout's seed and the tokens of the prompt, not from the order in which calls arrive;
- nothing is recorded after the rollout's end, nor for a client that has left before it was answered.
"""

import asyncio
import bisect
import collections
import dataclasses
import functools
import hashlib
import logging
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, NoReturn, TypeVar

import msgspec
import numpy as np

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.gateway.chats import Chats, ChatTooLong
from megatron_rl.gateway.record import ConversationRecord, cut_turn
from megatron_rl.gateway.rollout_context import AgentClock
from megatron_rl.gateway.said import Answer, Call, CallRefused, ChatDigests, write_said
from megatron_rl.shared.protocol import wire
from megatron_rl.tool_calls import JSON, Reader, Said

_log = logging.getLogger(__name__)

# The bytes that a call may have: this many for the frame of messages and tools, and for each token that it may have.
_FRAME_BYTES = 1 << 20
_BYTES_OF_TOKEN = 64
# The answers whose chats a call may name.
_MOST_KEPT, _MOST_KEPT_CHARACTERS = 32, 1 << 20
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TurnRequest:
    tokens: tuple[int, ...]
    """All tokens before it, those of the prompt included."""
    seed: int
    max_tokens: int
    number: int
    """The number of the call in its rollout."""
    after: str | None
    """The engine that sampled the turn that it extends."""


Sample = Callable[[TurnRequest], Coroutine[Any, Any, wire.Response]]


@dataclasses.dataclass
class CallCounters:
    calls: int = 0
    branches: int = 0
    """The calls, first ones left out, whose messages extend those of no answered call."""
    refused: int = 0
    advised: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """The turns that did not follow an advice, by its parameter."""
    has_described_branch: bool = False


@dataclasses.dataclass(frozen=True)
class Terms:
    prompt: np.ndarray
    """The tokens of the group's prompt."""
    seed: int
    sampling: wire.Sampling


class OpenRollout:
    """A rollout that is not over."""

    def __init__(
        self,
        terms: Terms,
        sample: Sample,
        chats: Chats,
        reader: Reader,
        counters: CallCounters,
        reads_tools: bool,
        writer: Executor,
    ) -> None:
        """Make it; `writer` has one thread, in which chats are written."""
        self.terms = terms
        self.record = ConversationRecord(terms.prompt, terms.sampling)
        self.broken: str | None = None
        """The reason why the rollout was ended by a call that nothing can be made of."""
        self.fault: MegatronRLError | None = None
        """The failure of the engines."""
        self.limit: str | None = None
        """The limit for which a call was refused."""
        self.num_refused = 0
        self.last_refusal = ""
        self.is_cut = False
        """True if a turn ended because no token was left."""
        self.ended = asyncio.Event()
        self.clock = AgentClock()
        self.process: int | None = None
        """The process that it runs in; None if that is not known."""
        self.sockets: set[int] = set()
        """The sockets that processes of it have called with, by their inodes."""
        self._sample = sample
        self._chats = chats
        self._reader = reader
        self._counters = counters
        self._reads_tools = reads_tools
        self._writer = writer
        self._num_calls = 0
        self._num_taken = 0
        self._asked: dict[bytes, int] = {}
        # By the digest of a chat: the parts that end with its last message, each with digests of the answers in its
        # chat as they were sent; none for the chats before.
        self._known: dict[bytes, list[tuple[int, bytes]]] = {}
        self._answering: set[asyncio.Task[Any]] = set()
        self._num_open = 0
        self._has_overlap = False
        self._last: list[JSON] = []
        self._furthest: tuple[tuple[Any, ...], list[JSON]] = ((), [])
        # By the digest of a chat that the policy answered: the number of messages before the first that it said.
        self._begins: dict[bytes, int] = {}
        self._kept: dict[str, list[JSON]] = {}

    @property
    def messages(self) -> list[JSON]:
        """The chat of the last turn, from the first message that the policy said in it.

        If calls were open at the same time, which of them is answered last is chance. Then the tokens decide: of the
        chats that begin with the row's prompt, or else of all, the turn with the longest prompt is the last one.
        """
        return self._furthest[1] if self._has_overlap else self._last

    @property
    def most_bytes(self) -> int:
        """The most bytes of a call's body, which follow from the tokens that it may have."""
        return _FRAME_BYTES + _BYTES_OF_TOKEN * (len(self.terms.prompt) + self.terms.sampling.max_tokens)

    def refuse_size(self, num_bytes: int) -> NoReturn:
        self._refuse(f"a call of this rollout may have {self.most_bytes:,} bytes, and one has {num_bytes:,}")

    def recall(self, name: str) -> list[JSON] | None:
        """Return the chat of one of the last stored answers, with this answer; None if it is not known."""
        return self._kept.get(name)

    def start(self, answering: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin to answer; the rollout's end cancels it."""
        task = asyncio.get_running_loop().create_task(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return task

    def end(self) -> None:
        """End the rollout, and all answers that are not given yet."""
        self.ended.set()
        for task in self._answering:
            task.cancel()

    def renew(self) -> "OpenRollout":
        """Return a new rollout on the same terms; turns of both have different seeds."""
        arguments = self.terms, self._sample, self._chats, self._reader, self._counters, self._reads_tools, self._writer
        rollout = OpenRollout(*arguments)
        rollout._asked = self._asked
        return rollout

    def run_in(self, process: int) -> None:
        """Refuse calls of other processes than this one and its descendants from now on."""
        self.process = process

    def refuse_process(self) -> NoReturn:
        """Refuse a call of another process, and end the run: the rollouts of such an agent mix."""
        self.fault = MegatronRLError(
            f"process {self.process} acts in a rollout, and another process called with this rollout's key: an agent "
            "must use the key that it is given, in its own process and those that it starts"
        )
        self.end()
        raise CallRefused(str(self.fault), 401, "foreign_process")

    def break_off(self, reason: str) -> None:
        self.broken = self.broken or reason
        self.end()

    async def answer(self, call: Call) -> list[Answer]:
        """Sample turns, and record all of them or none; raise CallRefused if the rollout's limits are reached."""
        self._counters.calls += 1
        if call.tools and not self._reads_tools:
            raise CallRefused(
                "nothing reads the calls of tools of this model: start the run with --rollout-tool-parser NAME, or "
                "leave tools out",
                parameter="tools",
            )
        self._check_turns()
        self._has_overlap |= self._num_open > 0
        self._num_open += 1
        try:
            return await self._sample_answers(call)
        finally:
            self._num_open -= 1

    async def count(self, call: Call) -> int:
        """Count the tokens of a call's prompt; a chat that is too long is refused, and reaches no limit."""
        limit = self.limit
        try:
            return len((await self._compose(call, is_sampled=False))[0])
        finally:
            self.limit = limit

    async def _sample_answers(self, call: Call) -> list[Answer]:
        prompt, after = await self._compose(call)
        requests: list[TurnRequest] = []
        try:
            for _ in range(call.num_answers):
                requests.append(self._request(call, prompt, after))
                self._num_taken += 1
            turns = await self._sample_all(requests)
            read = [await self._read(turn, call) for turn in turns]
            # Calls that were answered meanwhile may have left fewer tokens.
            while (long := self._find_long(prompt, read)) is not None:
                number, left = long
                read[number] = await self._read(cut_turn(read[number].turn, self._check_left(left)), call)
        except BaseException as error:
            self._num_taken -= len(requests)
            if isinstance(error, MegatronRLError) and not isinstance(error, CallRefused):
                self.fault = error
                self.end()
                raise CallRefused(f"the turn was not sampled: {error}", 410, "failed") from None
            raise
        answers = []
        for one in read:
            self._record(call, prompt, one.turn, one.said)
            answers.append(self._write(call, len(prompt), one))
            self._keep(call, answers[-1])
        return answers

    async def _sample_all(self, requests: Sequence[TurnRequest]) -> list[wire.Response]:
        try:
            async with asyncio.TaskGroup() as tasks:
                sampling = [tasks.create_task(self._sample(request)) for request in requests]
        except BaseExceptionGroup as group:
            # The first failure is the reason; it cancelled the others.
            raise group.exceptions[0] from None
        return [task.result() for task in sampling]

    def _find_long(self, prompt: np.ndarray, read: "Sequence[_ReadTurn]") -> tuple[int, int] | None:
        """Find the first answer that has more tokens than are left for it, and these; None if all have room."""
        left = self.record.count_left(prompt)
        for number, one in enumerate(read):
            if len(one.turn.tokens) > 4 * left:
                return number, left
            left -= len(one.turn.tokens) // 4
        return None

    def _keep(self, call: Call, answer: Answer) -> None:
        """Count the advice that a turn does not follow, and keep its chat if a call may name it."""
        for advice in call.advice:
            if advice.is_followed(answer.said):
                continue
            if advice.parameter not in self._counters.advised:
                _log.warning("a call's %s was advice, and a turn did not follow it; reported once", advice.parameter)
            self._counters.advised[advice.parameter] += 1
        if call.num_instructions is not None:
            self._kept[answer.id] = [*call.messages[call.num_instructions :], write_said(answer.said)]
            sizes = [sum(len(one["content"]) for one in chat) for chat in self._kept.values()]
            while len(sizes) > 1 and (len(sizes) > _MOST_KEPT or sum(sizes) > _MOST_KEPT_CHARACTERS):
                del self._kept[next(iter(self._kept))], sizes[0]

    async def _compose(self, call: Call, is_sampled: bool = True) -> tuple[np.ndarray, str | None]:
        """Return a call's prompt, and the engine of the turn that it extends."""
        digests, messages = call.digests.ends, call.write_messages()
        try:
            if call.prompt is not None:
                tokens = call.prompt
                if isinstance(tokens, str):
                    tokens = await self._write_chat(self._chats.encode, tokens)
                elif (num := self._chats.num_tokens) is not None and max(tokens) >= num:
                    raise CallRefused(f"token {max(tokens)} is not one of the model's {num}", parameter="prompt")
                return np.asarray(tokens, dtype=self.terms.prompt.dtype), None
            for length in range(len(digests) - 1, 0, -1):
                if found := self._find_parts(call, digests[length - 1]):
                    number = self._choose(found, call.digests)
                    path = self.record.read_path(number)
                    calls = call.messages[length - 1].get("tool_calls", ())
                    new = await self._write_chat(
                        self._chats.extend, messages[length:], call.tools, path.tolist(), calls
                    )
                    prompt = np.concatenate([path, np.asarray(new, dtype=path.dtype)])
                    return prompt, self.record.parts[number].engine
            tokens = await self._write_chat(self._chats.render, messages, call.tools)
            prompt = np.asarray(tokens, dtype=self.terms.prompt.dtype)
        except ChatTooLong:
            self._refuse(f"this rollout may have {self.terms.sampling.max_tokens} tokens, and a call has more")
        except InputError as error:
            raise CallRefused(str(error), parameter="messages") from None
        if self._known and is_sampled:
            self._note_branch(call)
        return prompt, None

    def _find_parts(self, call: Call, digest: bytes) -> list[tuple[int, bytes]]:
        """Return the parts that a call may extend where its chat has this digest."""
        return [part for part in self._known.get(digest, ()) if call.digests.may_extend(part[1])]

    def _choose(self, found: Sequence[tuple[int, bytes]], digests: ChatDigests) -> int:
        """Choose the part that a chat extends: of equal answers, those with the most messages as the client sent them.

        Of those that are left, the first by its tokens is chosen, whenever it was answered.
        """

        def rank(part: tuple[int, bytes]) -> tuple[Any, ...]:
            number, exact = part
            return -digests.count_equal(exact), self.record.get_order(number)

        return found[0][0] if len(found) == 1 else min(found, key=rank)[0]

    async def _write_chat(self, write: Callable[..., list[int]], *parts: Any) -> list[int]:
        """Write a chat in the writer's thread: it takes seconds for a long one, and the event loop has other calls.

        Calls are written one at a time, in the order in which they came.
        """
        # No prompt of a call that is answered has more: what it shares is in the group's prompt or recorded.
        most = len(self.terms.prompt) + self.terms.sampling.max_tokens
        return await asyncio.get_running_loop().run_in_executor(
            self._writer, functools.partial(write, *parts, most=most)
        )

    def _note_branch(self, call: Call) -> None:
        self._counters.branches += 1
        new = (
            place
            for place, digest in enumerate(call.digests.ends)
            if digest not in self._known or (self._known[digest] and not self._find_parts(call, digest))
        )
        place = next(new, None)
        if self._counters.has_described_branch or place is None:
            return
        self._counters.has_described_branch = True
        message = call.messages[place]
        _log.warning(
            "a call extends no answered call of its rollout, and is trained as a branch: its message %d (%s) differs "
            "from all that were recorded, or its tools do: %.200r; this is reported once",
            place + 1,
            message["role"],
            message["content"],
        )

    def _check_turns(self) -> None:
        if self._num_taken >= self.terms.sampling.max_turns:
            self._refuse(f"all {self.terms.sampling.max_turns} turns of this rollout are taken")

    def _request(self, call: Call, prompt: np.ndarray, after: str | None) -> TurnRequest:
        # Others may have been taken while the chat was written.
        self._check_turns()
        left = self._check_left(self.record.count_left(prompt))
        self._num_calls += 1
        key = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        repeated = self._asked[key] = self._asked.get(key, -1) + 1
        return TurnRequest(
            tokens=tuple(prompt.tolist()),
            seed=_derive_seed(self.terms.seed, key, repeated),
            max_tokens=min(left, call.max_tokens or left),
            number=self._num_calls - 1,
            after=after,
        )

    def _check_left(self, left: int) -> int:
        if left < 1:
            most = self.terms.sampling.max_tokens
            self._refuse(f"this rollout may have {most} tokens, prompts of its calls included, and none is left")
        return left

    def _refuse(self, reason: str) -> NoReturn:
        self.limit = reason
        raise CallRefused(f"{reason}: end here", code="limit")

    async def _read(self, turn: wire.Response, call: Call) -> "_ReadTurn":
        """Read a turn up to the first text that it is to end before."""
        tokens = wire.decode_tokens(turn.tokens).tolist()
        text = self._chats.decode(tokens)
        stop = min((stop for stop in call.stop if stop in text), key=text.index, default=None)
        if stop is not None:
            # The tokens up to the end of the text are the policy's; those after it were never said.
            places = range(1, len(tokens) + 1)
            length = 1 + bisect.bisect_left(places, True, key=lambda place: stop in self._chats.decode(tokens[:place]))
            turn = msgspec.structs.replace(cut_turn(turn, length), finish_reason="stop")
            tokens = tokens[:length]
            text = self._chats.decode(tokens)
        # What continues a text has no parts.
        said = Said(text, None, ()) if call.prompt is not None else await self._reader.read(tokens, text, call.tools)
        if stop is not None:
            said = dataclasses.replace(said, content=said.content.partition(stop)[0])
        return _ReadTurn(turn, said, stop)

    def _record(self, call: Call, prompt: np.ndarray, turn: wire.Response, said: Said) -> None:
        number = self.record.add(prompt, turn)
        self.is_cut |= turn.finish_reason == "length"
        if call.prompt is None:
            self._note_chat(call, number, said)
        else:
            self._last = [write_said(said)]
        self._furthest = max(
            self._furthest, (self.record.get_depth(number), self._last), key=lambda furthest: furthest[0]
        )

    def _note_chat(self, call: Call, number: int, said: Said) -> None:
        """Note the chat that a turn ends, so that later calls extend it."""
        for digest in call.digests.ends:
            self._known.setdefault(digest, [])
        # Several answers end different chats.
        digests, reply = call.digests.copy(), write_said(said)
        begin = next((self._begins[end] for end in reversed(digests.ends) if end in self._begins), len(digests.ends))
        digests.add(reply)
        answered = digests.ends[-1]
        self._known.setdefault(answered, []).append((number, digests.exact))
        self._begins[answered] = begin
        self._last = [*call.messages, reply][begin:]

    def _write(self, call: Call, num_prompt_tokens: int, read: "_ReadTurn") -> Answer:
        turn, said, stopped_by = read
        tokens = wire.decode_tokens(turn.tokens).tolist()
        return Answer(
            id=uuid.uuid4().hex,
            said=said,
            is_cut=turn.finish_reason == "length",
            num_prompt_tokens=num_prompt_tokens,
            tokens=tokens,
            log_probs=wire.decode_log_probs(turn.log_probs).tolist(),
            texts=[self._chats.decode([token]) for token in tokens] if call.has_log_probs else [],
            stopped_by=stopped_by,
        )


class _ReadTurn(NamedTuple):
    turn: wire.Response
    said: Said
    stopped_by: str | None
    """The text that it was cut at; None if it was not."""


def _derive_seed(seed: int, key: bytes, repeated: int) -> int:
    """Derive the seed of a turn: two turns with one seed would draw the same random numbers."""
    text = f"{seed}\0{repeated}\0".encode() + key
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
