import asyncio

import pytest

from megatron_rl.sidecar.engines.decoding import Decoding, StepCosts
from tests import virtual_time


def test_a_step_takes_longer_the_more_responses_run_in_it() -> None:
    async def sample() -> list[float]:
        decoding, clock = Decoding(StepCosts(1.0, 0.5, max_running=8)), asyncio.get_running_loop().time
        ends: list[float] = []

        async def one(lengths: list[int]) -> None:
            assert await decoding.sample(lengths) == lengths
            ends.append(clock())

        await asyncio.gather(one([4, 2]), one([10]))
        return ends

    # Two steps with three responses, two with two, six with one.
    assert virtual_time.run(sample()) == pytest.approx([2 * 2.5 + 2 * 2, 2 * 2.5 + 2 * 2 + 6 * 1.5])


def test_responses_beyond_those_that_run_wait_in_the_order_in_which_they_came() -> None:
    async def sample() -> list[tuple[str, float]]:
        decoding, clock = Decoding(StepCosts(1.0, 0.0, max_running=2)), asyncio.get_running_loop().time
        ends: list[tuple[str, float]] = []

        async def one(name: str, lengths: list[int]) -> None:
            await decoding.sample(lengths)
            ends.append((name, clock()))

        await asyncio.gather(one("first", [5, 3]), one("second", [4]), one("third", [1]))
        return ends

    assert virtual_time.run(sample()) == [("first", 5.0), ("third", 6.0), ("second", 7.0)]


def test_a_cancelled_group_leaves_its_place_to_others() -> None:
    async def sample() -> float:
        decoding = Decoding(StepCosts(0.0, 1.0, max_running=4))
        cancelled = asyncio.create_task(decoding.sample([100, 100]))
        other = asyncio.create_task(decoding.sample([10]))
        await asyncio.sleep(6)
        cancelled.cancel()
        await other
        return asyncio.get_running_loop().time()

    # Two of ten steps with three responses, and eight alone.
    assert virtual_time.run(sample()) == pytest.approx(6 + 8)


def test_a_group_that_is_cut_has_the_tokens_of_the_steps_so_far() -> None:
    async def sample() -> list[int]:
        decoding, cut = Decoding(StepCosts(1.0, 0.0, max_running=2)), asyncio.Event()
        asyncio.get_running_loop().call_later(4.5, cut.set)
        return await decoding.sample([3, 9, 9], cut)

    assert virtual_time.run(sample()) == [3, 4, 1]
