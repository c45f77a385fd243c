"""The size of calls and of rollouts: what one costs the event loop, and how much memory an open one has."""

import asyncio
import json
import tracemalloc

import numpy as np
import pytest

from megatron_rl.gateway.chats import NumberChats
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import OpenRollout, Terms, TurnRequest
from megatron_rl.gateway.said import Call
from megatron_rl.shared.protocol import wire
from megatron_rl.tool_calls import JSON, PlainReader
from tests.turns import make_turn

NUM_TURNS = 200


async def sample(request: TurnRequest) -> wire.Response:
    return make_turn([request.number], seed=request.seed)


async def act(rollout: OpenRollout, num_turns: int) -> None:
    """Have turns as a client does, which sends the whole chat each time."""
    messages = [{"role": "user", "content": "7 8"}]
    for number in range(num_turns):
        # A body is parsed into new objects.
        answer = await rollout.answer(Call(json.loads(json.dumps(messages)), [], None))
        messages.append({"role": "assistant", "content": answer.said.content})
        messages.append({"role": "user", "content": f"{number} " * 100})


def test_the_memory_of_an_open_rollout_grows_with_its_tokens_and_not_with_their_square() -> None:
    async def run() -> list[int]:
        gateway = Gateway(NumberChats(), PlainReader(), reads_tools=False)
        terms = Terms(np.asarray([7, 8], dtype="<i4"), 5, wire.Sampling(max_tokens=1 << 20, max_turns=NUM_TURNS))
        sizes = []
        for num_turns in (NUM_TURNS // 4, NUM_TURNS):
            with gateway.open(terms, sample) as (_, rollout):
                before, _ = tracemalloc.get_traced_memory()
                await act(rollout, num_turns)
                sizes.append(tracemalloc.get_traced_memory()[0] - before)
                assert rollout.record.num_turns == num_turns
        return sizes

    tracemalloc.start()
    try:
        few, many = asyncio.run(run())
    finally:
        tracemalloc.stop()
    assert many < 1 << 20
    # Digests of the answers alone grow with the square of their number, by 8 bytes each.
    assert many < 6 * few


def ask(text: str) -> Call:
    return Call([{"role": "user", "content": text}], [], None)


@pytest.mark.parametrize("is_main_late", [True, False])
def test_the_last_turn_of_parallel_calls_does_not_depend_on_which_is_answered_first(is_main_late: bool) -> None:
    """Let one branch make a call, and the other one two calls sequentially."""

    async def run() -> list[JSON]:
        is_over = {text: asyncio.Event() for text in ("7 8 9", "1 2 3 4", "1 2 3 4 5 6")}
        begun: list[str] = []

        async def sample_when_told(request: TurnRequest) -> wire.Response:
            text = " ".join(map(str, request.tokens))
            begun.append(text)
            await is_over[text].wait()
            return await sample(request)

        terms = Terms(np.asarray([7, 8], dtype="<i4"), 5, wire.Sampling(max_tokens=1 << 20, max_turns=NUM_TURNS))
        with Gateway(NumberChats(), PlainReader(), reads_tools=False).open(terms, sample_when_told) as (_, rollout):
            main, helper = (asyncio.ensure_future(rollout.answer(ask(text))) for text in ("7 8 9", "1 2 3 4"))
            while len(begun) < 2:
                await asyncio.sleep(0)
            if not is_main_late:
                is_over["7 8 9"].set()
                await main
            is_over["1 2 3 4"].set()
            is_over["1 2 3 4 5 6"].set()
            await helper
            await rollout.answer(ask("1 2 3 4 5 6"))
            is_over["7 8 9"].set()
            await main
            return rollout.messages

    # The chat that begins with the row's prompt, though the helper's are longer.
    assert asyncio.run(run()) == [{"role": "assistant", "content": "0"}]
