"""Open rollouts without HTTP: their memory, and calls that are open at the same time."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest

from megatron_rl.errors import MegatronRLError
from megatron_rl.gateway.chats import Chats, NumberChats
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import OpenRollout, Sample, Terms, TurnRequest
from megatron_rl.gateway.said import Call
from megatron_rl.shared.protocol import wire
from megatron_rl.tool_calls import PlainReader, Reader, Said
from tests.reward_pools import in_event_loop, wait_until
from tests.turns import make_turn

NUM_TURNS = 200


async def sample(request: TurnRequest) -> wire.Response:
    return make_turn([request.number], seed=request.seed)


def ask(text: str) -> Call:
    return Call([{"role": "user", "content": text}], [], None)


def opening(
    sample: Sample, prompt: Sequence[int] = (7, 8), chats: Chats | None = None, reader: Reader | None = None
) -> AbstractContextManager[tuple[str, OpenRollout]]:
    """Open a rollout of a gateway of its own."""
    terms = Terms(np.asarray(prompt, dtype="<i4"), 5, wire.Sampling(max_tokens=1 << 20, max_turns=NUM_TURNS))
    return Gateway(chats or NumberChats(), reader or PlainReader(), reads_tools=False).open(terms, sample)


async def act(rollout: OpenRollout, num_turns: int) -> None:
    """Have turns as a client does, which sends the whole chat each time."""
    messages = [{"role": "user", "content": "7 8"}]
    for number in range(num_turns):
        # A body is parsed into new objects.
        (answer,) = await rollout.answer(Call(json.loads(json.dumps(messages)), [], None))
        messages.append({"role": "assistant", "content": answer.said.content})
        messages.append({"role": "user", "content": f"{number} " * 100})


@in_event_loop
async def test_the_memory_of_an_open_rollout_grows_with_its_tokens_and_not_with_their_square() -> None:
    sizes = []
    tracemalloc.start()
    try:
        for num_turns in (NUM_TURNS // 4, NUM_TURNS):
            with opening(sample) as (_, rollout):
                before, _ = tracemalloc.get_traced_memory()
                await act(rollout, num_turns)
                sizes.append(tracemalloc.get_traced_memory()[0] - before)
                assert rollout.record.num_turns == num_turns
    finally:
        tracemalloc.stop()
    few, many = sizes
    assert many < 1 << 20
    # Digests of the answers alone grow with the square of their number, by 8 bytes each.
    assert many < 6 * few


@pytest.mark.parametrize("is_main_late", [True, False])
@in_event_loop
async def test_the_last_turn_of_parallel_calls_does_not_depend_on_which_is_answered_first(is_main_late: bool) -> None:
    """Let one branch make a call, and the other one two calls sequentially."""
    is_over = {text: asyncio.Event() for text in ("7 8 9", "1 2 3 4", "1 2 3 4 5 6")}
    begun: list[str] = []

    async def sample_when_told(request: TurnRequest) -> wire.Response:
        text = " ".join(map(str, request.tokens))
        begun.append(text)
        await is_over[text].wait()
        return await sample(request)

    with opening(sample_when_told) as (_, rollout):
        main, helper = (asyncio.ensure_future(rollout.answer(ask(text))) for text in ("7 8 9", "1 2 3 4"))
        await wait_until(lambda: len(begun) == 2)
        if not is_main_late:
            is_over["7 8 9"].set()
            await main
        is_over["1 2 3 4"].set()
        is_over["1 2 3 4 5 6"].set()
        await helper
        await rollout.answer(ask("1 2 3 4 5 6"))
        is_over["7 8 9"].set()
        await main
        # The chat that begins with the row's prompt, though the helper's are longer.
        assert rollout.messages == [{"role": "assistant", "content": "0"}]


@in_event_loop
async def test_chats_are_written_beside_the_event_loop_in_the_order_of_their_calls() -> None:
    going = threading.Event()
    written: list[str] = []

    class SlowChats(NumberChats):
        def render(self, messages, tools, **rest: Any) -> list[int]:
            written.append(messages[0]["content"])
            assert messages[0]["content"] != "1" or going.wait(10), "the event loop stands"
            return super().render(messages, tools, **rest)

    requests: list[TurnRequest] = []

    async def sample(request: TurnRequest) -> wire.Response:
        requests.append(request)
        raise MegatronRLError("enough")

    with opening(sample, chats=SlowChats()) as (_, rollout):
        answering = [asyncio.create_task(rollout.answer(ask(text))) for text in "123"]
        await wait_until(lambda: written)
        assert written == ["1"]
        going.set()
        await asyncio.wait(answering)
    assert [(request.number, request.tokens) for request in requests] == [(0, (1,)), (1, (2,)), (2, (3,))]


@pytest.mark.parametrize("has_thoughts", [True, False])
def test_a_call_extends_the_same_one_of_equal_answers_in_every_order_of_arrival(has_thoughts: bool) -> None:
    class Thoughts:
        async def read(self, tokens, text: str, tools) -> Said:
            return Said(str(tokens[-1]), str(tokens[0]), ())

    async def run(first: int) -> list[tuple[int, ...]]:
        answered = [asyncio.Event(), asyncio.Event()]
        requests: list[TurnRequest] = []

        async def sample(request: TurnRequest) -> wire.Response:
            requests.append(request)
            if request.number < 2 and request.number != first:
                await answered[first].wait()
            return make_turn([12 - request.number, 50])

        with opening(sample, (7,), reader=Thoughts()) as (_, rollout):

            async def ask_first(number: int) -> Any:
                (answer,) = await rollout.answer(ask("7"))
                answered[number].set()
                return answer

            answers = await asyncio.gather(ask_first(0), ask_first(1))
            for answer in answers:
                said = {"role": "assistant", "content": answer.said.content}
                if has_thoughts:
                    said["reasoning_content"] = answer.said.reasoning
                messages = [*ask("7").messages, said, {"role": "user", "content": "20"}]
                await rollout.answer(Call(messages, [], None))
        return [request.tokens for request in requests[2:]]

    both = [asyncio.run(run(first)) for first in (0, 1)]
    thoughts = (12, 11) if has_thoughts else (11, 11)
    assert both == [[(7, thought, 50, 20) for thought in thoughts]] * 2
