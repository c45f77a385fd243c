"""Sampling from weights that clients have kept, and a record of each sequence.

Engines hold one set of weights at a time. Requests for others wait until the running ones have ended; then the ranks
publish what the longest waiting one needs. Invariants:

- a sequence was sampled whole from the weights that its sampler names: they have one fingerprint, which every engine
  has proved to hold;
- requests go in the order of their arrival, but requests for the same weights go together.
"""

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import numpy as np

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import Response, Sampling, decode_tokens
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.group_maker import Samplers
from megatron_rl.tinker import work
from megatron_rl.tinker.ranks import Ranks

Decode = Callable[[Sequence[Sequence[int]]], list[str]]


@dataclasses.dataclass(frozen=True)
class Held:
    """Weights that engines hold."""

    name: str | None
    version: int
    fingerprint: str


class WeightTurns:
    """The turns of weights in the engines."""

    def __init__(self, ranks: Ranks, last_version: int) -> None:
        """Publish versions after the last one of an earlier life."""
        self._ranks = ranks
        self._held: Held | None = None
        self._num_running = 0
        self._last_version = last_version
        self._waiting: collections.deque[tuple[str | None, asyncio.Future[Held]]] = collections.deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def holding(self, name: str | None) -> AsyncIterator[Held]:
        """Wait until engines hold the weights of this name, the base's if None; they keep them within the context."""
        future: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._turn())
        held = await future
        try:
            yield held
        finally:
            self._num_running -= 1
            self._changed.set()

    async def _turn(self) -> None:
        while self._waiting:
            name = self._waiting[0][0]
            if self._held is None or self._held.name != name:
                while self._num_running:
                    self._changed.clear()
                    await self._changed.wait()
                self._held = None
                self._last_version += 1
                try:
                    published = await self._ranks.do(work.Bring(name=name, version=self._last_version))
                except Exception as error:
                    self._answer(name, error)
                    continue
                assert isinstance(published, work.PublishDone)
                self._held = Held(name, self._last_version, published.fingerprint)
            self._answer(name, self._held)

    def _answer(self, name: str | None, answer: Held | Exception) -> None:
        """Answer all that wait for these weights now."""
        waiting, self._waiting = self._waiting, collections.deque()
        for wanted, future in waiting:
            if wanted != name:
                self._waiting.append((wanted, future))
            elif future.done():
                continue
            elif isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                self._num_running += 1
                future.set_result(answer)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The sequences that a client asks for."""

    prompt: np.ndarray
    num_samples: int
    seed: int
    max_tokens: int
    temperature: float
    stop: Sequence[int] | Sequence[str] | None
    """Tokens or texts that end a sequence; the model's own end if None."""


async def sample(engines: Samplers, wanted: Wanted, request: str, decode: Decode) -> list[Response]:
    """Sample sequences, each up to and with what stops it."""
    stop = wanted.stop
    texts = [one for one in stop or () if isinstance(one, str)]
    tokens = [one for one in stop or () if isinstance(one, int)]
    sampling = Sampling(
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        stop_token_ids=tokens,
        # With texts the model's own end counts too: what follows it is not text of the model.
        ignore_eos=stop is not None and not texts,
    )
    # At temperature 0 all are the same, and engines sample one.
    count = wanted.num_samples if wanted.temperature > 0 else 1
    responses = [*await engines.generate(GroupRequest(request, wanted.prompt.tolist(), count, wanted.seed, sampling))]
    if texts:
        responses = [await asyncio.to_thread(_cut, one, texts, decode) for one in responses]
    return responses * (wanted.num_samples // count)


def _cut(response: Response, stops: Sequence[str], decode: Decode) -> Response:
    """Cut a response after the token that completes the first of these texts."""
    tokens = decode_tokens(response.tokens).tolist()

    def has_stopped(length: int) -> bool:
        (text,) = decode([tokens[:length]])
        return any(stop in text for stop in stops)

    if not has_stopped(len(tokens)):
        return response
    low, high = 0, len(tokens)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_stopped(middle) else (middle, high)
    return msgspec.structs.replace(
        response, tokens=response.tokens[: 4 * high], log_probs=response.log_probs[: 4 * high], finish_reason="stop"
    )


def check_fits(wanted: Wanted, longest: int) -> None:
    if not len(wanted.prompt):
        raise InputError("a prompt has at least one token")
    if len(wanted.prompt) + 1 > longest:
        raise InputError(f"the prompt has {len(wanted.prompt)} tokens, and engines take {longest} with the answer")
