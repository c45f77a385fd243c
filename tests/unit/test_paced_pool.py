"""The engine pool beside a pacer, in virtual time: when groups begin, and what cannot hold them up."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from megatron_rl.shared.protocol.wire import Plan, Response, Sampling
from megatron_rl.sidecar.engines import EngineLost, EngineState, GroupRequest
from megatron_rl.sidecar.engines.pool import EnginePool
from megatron_rl.sidecar.in_flight.control import Pacer
from megatron_rl.sidecar.in_flight.forecast import Opening
from tests import virtual_time

SIZE, SECONDS, MOST = 2, 10.0, 16
OPENING = Opening(8, 1.0, limits=(1, 2, 3, 4, 4, 3, 2, 1), delays=(0.0, 1.0, 2.0))
# By hand: the delays, then room for 4 groups at once, then for 3, for 2 and for 1.
BEGINS = [0.0, 1.0, 2.0, 2.0, 10.0, 12.0, 20.0, 30.0]


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        virtual_time.run(test(**arguments))

    return run


@dataclasses.dataclass
class _Engine:
    name: str
    begun: list[tuple[float, int]]
    state: EngineState = EngineState.READY
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    num_running: int = 0
    most_running: int = 0

    async def generate(self, request: GroupRequest) -> list[Response]:
        self.begun.append((asyncio.get_running_loop().time(), request.prompt))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.wait_for(self.lost.wait(), SECONDS)
        except TimeoutError:
            return []
        finally:
            self.num_running -= 1
        self.state = EngineState.DEAD
        raise EngineLost(f"{self.name} is lost")


class _Run:
    """A pool with a pacer, and the begins of the groups that it was given."""

    def __init__(self, num_engines: int = 1, opening: Opening = OPENING, is_chosen: bool = True) -> None:
        self.begun: list[tuple[float, int]] = []
        self.engines = [_Engine(f"engine-{index}", self.begun) for index in range(num_engines)]
        self.pool = EnginePool(lambda: self.engines, MOST, lambda engine, error: None, lambda: None)  # type: ignore[arg-type, return-value]
        self.pacer = Pacer(MOST, 8, is_chosen)
        self.pacer.opening = opening
        self.pool.pacing = self.pacer
        self.pacer.on_room = self.pool.engines_changed

    async def begin(self, num_prompts: int = 8) -> None:
        await self.pacer.begin(Plan(num_prompts=num_prompts, group_size=SIZE, num_replicas=1, micro_batch_size=SIZE))

    def sample(
        self, prompts: Sequence[int], can_wait: bool = False, after: str | None = None
    ) -> "asyncio.Future[list[list[Response]]]":
        requests = [
            GroupRequest(str(one), (1,), SIZE, 0, Sampling(max_tokens=1), can_wait, prompt=one, after=after)
            for one in prompts
        ]
        return asyncio.gather(*map(self.pool.generate, requests))

    def times(self, wanted: Callable[[int], bool] = lambda prompt: True) -> list[float]:
        return [time for time, prompt in self.begun if wanted(prompt)]


@pytest.mark.parametrize("num_engines", [1, 2])
@in_virtual_time
async def test_the_number_in_flight_rises_and_falls_on_each_engine_by_the_groups_that_all_have_begun(
    num_engines: int,
) -> None:
    run = _Run(num_engines)
    await run.begin()
    await run.sample(range(8 * num_engines))
    assert run.times() == sorted(BEGINS * num_engines)
    assert [prompt for _, prompt in run.begun] == list(range(8 * num_engines))


@in_virtual_time
async def test_each_iteration_begins_its_opening_again() -> None:
    run = _Run()
    await run.begin()
    await run.sample(range(3))
    await asyncio.sleep(50 - asyncio.get_running_loop().time())
    await run.begin()
    await asyncio.sleep(0.5)
    # The delays of the iteration that ends here must not open the next one.
    await run.begin()
    run.begun.clear()
    await run.sample(range(8))
    assert run.times() == [50.5 + begin for begin in BEGINS]


@in_virtual_time
async def test_an_idle_engine_waits_for_no_delay() -> None:
    run = _Run(opening=Opening(8, 1.0, limits=(1, 1, 1), delays=(0.0, 100.0, 200.0)))
    await run.begin()
    await run.sample(range(3))
    assert run.times() == [0.0, 10.0, 20.0]


@in_virtual_time
async def test_an_engine_that_is_lost_in_the_middle_leaves_its_groups_to_the_other() -> None:
    run = _Run(num_engines=2)
    await run.begin()
    sampled = run.sample(range(16))
    await asyncio.sleep(11)
    run.engines[1].lost.set()
    assert len(await sampled) == 16
    firsts = list(dict.fromkeys(prompt for _, prompt in run.begun))
    assert firsts == list(range(16))
    assert 0 < run.pool.num_retried == len(run.begun) - 16
    assert max(engine.most_running for engine in run.engines) == OPENING.num_in_flight // SIZE
    # The plan was for 8 groups of each engine: later ones have all of the room, and need two rounds.
    assert max(run.times()) <= 50


@in_virtual_time
async def test_evaluations_that_run_leave_an_iteration_its_pace() -> None:
    run = _Run()
    await run.begin()
    evaluated = run.sample(range(100, 103), can_wait=True)
    await run.sample(range(8))
    assert run.times(lambda prompt: prompt < 100) == BEGINS
    assert run.times(lambda prompt: prompt >= 100) == [0.0] * 3
    await evaluated


@in_virtual_time
async def test_evaluations_have_all_of_the_number_in_flight_after_an_iteration_with_fewer_groups_than_planned() -> None:
    run = _Run()
    await run.begin()
    await run.sample(range(7))
    run.begun.clear()
    await run.sample(range(100, 106), can_wait=True)
    assert run.times() == [30.0] * 4 + [40.0] * 2


@in_virtual_time
async def test_evaluations_and_an_iteration_share_the_bound() -> None:
    run = _Run(opening=Opening(MOST))
    await run.begin()
    evaluated = run.sample(range(100, 105), can_wait=True)
    await run.sample(range(8))
    await evaluated
    assert run.times() == [0.0] * 8 + [10.0] * 5
    assert run.engines[0].most_running == MOST // SIZE


@in_virtual_time
async def test_turns_go_before_groups_in_the_order_in_which_they_came() -> None:
    run = _Run(is_chosen=False)
    await run.begin()
    running = run.sample(range(8))
    await asyncio.sleep(1)
    waiting = run.sample([8, 9]), run.sample([20, 21, 22], after="engine-0")
    waiting_long = run.sample([30], can_wait=True), run.sample([40], can_wait=True, after="engine-0")
    for one in (running, *waiting, *waiting_long):
        await one
    assert [prompt for _, prompt in run.begun[8:]] == [20, 21, 22, 8, 9, 40, 30]


@in_virtual_time
async def test_a_fixed_number_has_no_pace() -> None:
    run = _Run(is_chosen=False)
    await run.begin()
    await run.sample(range(10))
    assert run.times() == [0.0] * 8 + [10.0] * 2


@in_virtual_time
async def test_only_engines_that_are_ready_share_the_groups_that_have_begun() -> None:
    run = _Run(num_engines=2)
    for engine in run.engines:
        engine.state = EngineState.STARTING
    await run.begin()
    sampled = run.sample(range(8))
    await asyncio.sleep(0)
    run.engines[0].state = EngineState.READY
    run.pool.engines_changed()
    await sampled
    assert run.times() == BEGINS
