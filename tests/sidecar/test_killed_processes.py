"""An engine whose process is killed or stopped, at any moment, is named soon and restarted.

The servers are stand-ins that behave as vLLM's, so that ten moments of each step can be tried.
"""

import asyncio
import signal
import statistics
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megatron_rl.sidecar.attempts import Pace
from tests.sidecar.standin_engines import (
    PROCESSES,
    STEP_SECONDS,
    STEPS,
    break_end,
    break_in,
    break_start,
    request,
    standing_in,
    until,
)

NUM_MOMENTS = 10
NUM_AT_A_TIME = 6
MOMENTS = [STEP_SECONDS * number / NUM_MOMENTS for number in range(NUM_MOMENTS)]
FAULTS = {
    "killed": (signal.SIGKILL, PROCESSES),
    "stopped": (signal.SIGSTOP, PROCESSES),
    # The other processes end as vLLM ends them.
    "asked to end": (signal.SIGTERM, ("server",)),
}


@pytest.mark.each_change
@pytest.mark.parametrize(
    ("step", "kind", "number", "delay"),
    [
        ("pause", "core", signal.SIGKILL, 0.0),
        ("trainer", "core", signal.SIGKILL, 0.1),
        ("sampling", "core", signal.SIGSTOP, 0.1),
    ],
)
def test_a_process_that_is_lost_in_a_step_is_named_and_the_step_succeeds(step, kind, number, delay, tmp_path):
    seconds, recovered, text = asyncio.run(break_in(STEPS[step], kind, number, delay, tmp_path))
    print(f"{kind} in {step}: named after {seconds:.2f} s, well again after {recovered:.2f} s: {text}")


@pytest.mark.each_change
def test_a_worker_that_spins_is_named_by_the_silences_before_and_one_that_samples_for_long_is_not(tmp_path):
    async def check() -> None:
        # A silence lasts until the next look at least, so looks are frequent.
        async with standing_in(tmp_path, {"sampling": 600.0, "cut": 0.0}, watch_seconds=0.1) as world:
            # The configured two minutes hold until a silence has been measured.
            world.supervisor._members._factory._pace = pace = Pace(least_seconds=1.0)
            await world.supervisor.start(1)
            await world.publish()
            sampling = asyncio.create_task(world.supervisor.generate(request()))
            progress = world.engines[0]._progress
            await until(lambda: progress.longest)
            await asyncio.sleep(2 * pace.deadline("silence", 120.0, progress.longest))
            assert not world.named.event.is_set()
            worker = world.find("worker")
            assert worker is not None
            worker.send_signal(signal.SIGUSR1)
            await asyncio.wait_for(sampling, 90)
            assert "its core has made no progress for" in world.supervisor.status()["engines"]["engine-0"]["error"]

    asyncio.run(check())


Break = Callable[[str, int, float], Coroutine[Any, Any, float]]


def break_often(what: str, fault: str, break_once: Break) -> None:
    """Break each process at each moment, some at a time, and print the seconds until that was named."""
    number, kinds = FAULTS[fault]
    room = asyncio.Semaphore(NUM_AT_A_TIME)

    async def one(kind: str, delay: float) -> float:
        async with room:
            try:
                return await break_once(kind, number, delay)
            except Exception as error:
                raise AssertionError(f"{kind} {fault} {delay:g} s after {what} began: {error!r}") from error

    async def all_of_them() -> dict[str, list[float]]:
        return {kind: await asyncio.gather(*(one(kind, delay) for delay in MOMENTS)) for kind in kinds}

    for kind, seconds in asyncio.run(all_of_them()).items():
        print(f"{what}, {kind} {fault}: {statistics.median(seconds):.2f} s in the middle, {max(seconds):.2f} s at most")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", STEPS)
def test_each_process_that_is_lost_at_each_moment_of_a_step_is_named_and_the_step_succeeds(step, fault, tmp_path):
    async def break_once(kind: str, number: int, delay: float) -> float:
        return (await break_in(STEPS[step], kind, number, delay, tmp_path))[0]

    break_often(step, fault, break_once)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_process_that_is_lost_at_each_moment_of_a_start_ends_the_start_by_name(fault, tmp_path):
    async def break_once(kind: str, number: int, delay: float) -> float:
        # A start of two seconds.
        return (await break_start(kind, number, 4 * delay, tmp_path))[0]

    break_often("start", fault, break_once)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_ends_with_all_its_processes_whichever_is_lost_meanwhile(fault, tmp_path):
    async def break_once(kind: str, number: int, delay: float) -> float:
        return await break_end(kind, number, delay, tmp_path)

    break_often("end", fault, break_once)
