"""An engine whose process is killed or stopped, at any moment, is named soon and restarted.

The servers are stand-ins that behave as vLLM's, so that ten moments of each step can be tried.
"""

import asyncio
import signal
import statistics

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
async def test_a_worker_that_spins_is_named_by_the_silences_before_and_one_that_samples_for_long_is_not(tmp_path):
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


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("what", [*STEPS, "start", "end"])
async def test_each_process_that_is_lost_at_each_moment_is_named_soon(what, fault, tmp_path):
    """Break each process at each moment, some at a time, and print the seconds until that was named.

    A step succeeds all the same; a start ends with an error; an engine that ends does so with all its processes.
    """
    number, kinds = FAULTS[fault]
    room = asyncio.Semaphore(NUM_AT_A_TIME)

    async def break_once(kind: str, delay: float) -> float:
        if what == "start":
            # A start of two seconds.
            return (await break_start(kind, number, 4 * delay, tmp_path))[0]
        if what == "end":
            return await break_end(kind, number, delay, tmp_path)
        return (await break_in(STEPS[what], kind, number, delay, tmp_path))[0]

    async def break_in_its_turn(kind: str, delay: float) -> float:
        async with room:
            try:
                return await break_once(kind, delay)
            except Exception as error:
                raise AssertionError(f"{kind} {fault} {delay:g} s after {what} began: {error!r}") from error

    for kind in kinds:
        seconds = await asyncio.gather(*(break_in_its_turn(kind, delay) for delay in MOMENTS))
        print(f"{what}, {kind} {fault}: {statistics.median(seconds):.2f} s in the middle, {max(seconds):.2f} s at most")
