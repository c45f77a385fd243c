"""Engines whose servers are stand-ins, for tests that break one of their processes at a moment."""

import asyncio
import contextlib
import dataclasses
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.shared.protocol.wire import ProbeAnswer, Sampling, encode_log_probs
from megatron_rl.sidecar.engines import EngineLost, EngineState, GroupRequest
from megatron_rl.sidecar.launcher import LocalHandle, LocalLauncher, ProcessSpec
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import ServerConfig
from tests.sidecar.fake_engines import weights
from tests.sidecar.naming import NAMED_SECONDS, Named, naming
from tests.sidecar.sidecar_process import alive

SERVER = Path(__file__).with_name("standin_vllm.py")
PROCESSES = ("server", "core", "worker")
STEP_SECONDS = 0.5
# The tokens of a probe that the engine draws, from the second token on.
NUM_PROBED = 63
RECOVERED_SECONDS = 120.0


class StandInLauncher(LocalLauncher):
    """A launcher that starts stand-ins instead of vLLM; only the steps of the first one take time."""

    def __init__(self, slow: dict[str, float]) -> None:
        self._slow = slow

    def start(self, spec: ProcessSpec) -> LocalHandle:
        words = [f"{step}={seconds}" for step, seconds in self._slow.items()]
        self._slow = {}
        command = (sys.executable, str(SERVER), spec.address, *words)
        environment = {**spec.environment, "PYTHONPATH": str(SERVER.parents[2])}
        return super().start(dataclasses.replace(spec, command=command, environment=environment))


class RecordingFactory(VllmFactory):
    """A factory that remembers its engines."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.engines: list[Any] = []

    def create(self, name: str) -> Any:
        self.engines.append(super().create(name))
        return self.engines[-1]


@dataclasses.dataclass
class World:
    """A supervisor over one stand-in."""

    supervisor: Supervisor
    engines: list[Any]
    folder: Path
    named: Named

    def find(self, kind: str) -> psutil.Process | None:
        """Return the process of this kind of the newest engine; None if it does not exist."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            process = psutil.Process(self.engines[-1]._handle.pid)
            for _ in range(PROCESSES.index(kind)):
                process = process.children()[0]
            return process
        return None

    def is_in(self, step: str) -> bool:
        return self.supervisor._steps.current.get("engine-0", ("", 0.0))[0] == step

    async def publish(self) -> None:
        await self.supervisor.publish(weights(1, str(self.folder)))


Act = Callable[[World], Coroutine[Any, Any, object]]


@contextlib.asynccontextmanager
async def standing_in(folder: Path, slow: dict[str, float], **config: Any) -> AsyncIterator[World]:
    sockets = make_socket_folder()
    factory = RecordingFactory(ServerConfig(model="", max_model_len=512), sockets, StandInLauncher(slow))
    supervisor = Supervisor(factory, SupervisorConfig(first_pause=0.1, **config))
    try:
        with naming("engine-0") as named:
            yield World(supervisor, factory.engines, folder, named)
    finally:
        await supervisor.close()
        shutil.rmtree(sockets)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(RECOVERED_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def request(**changes: Any) -> GroupRequest:
    return GroupRequest("group-0", (1, 2, 3), 1, 0, Sampling(max_tokens=1), **changes)


@dataclasses.dataclass(frozen=True)
class Step:
    """An action of an engine, which is broken in the middle."""

    slow: dict[str, float]
    prepare: Act
    """A function that brings the engine to where the step begins."""
    act: Act
    """A function that takes the step, and returns when all is well again."""
    has_begun: Callable[[World], bool]


async def _start(world: World) -> None:
    await world.supervisor.start(1)


async def _start_and_publish(world: World) -> None:
    await _start(world)
    await world.publish()


async def _publish_and_wait_for_the_trainer(world: World) -> None:
    told = weights(1, str(world.folder))

    async def wait() -> ProbeAnswer:
        # The trainer answers when another engine has taken the place of the one that was lost.
        await until(lambda: len(world.engines) > 1)
        return ProbeAnswer(
            run=told.run, version=told.version, fingerprint=told.fingerprint, dtype="float32",
            log_probs=encode_log_probs([-1.0] * NUM_PROBED),
        )  # fmt: skip

    await world.supervisor.publish(told, wait)


async def _cut(world: World) -> object:
    cut = asyncio.Event()
    task = asyncio.create_task(world.supervisor.generate(request(cut=cut)))
    await until(lambda: world.supervisor.pool.in_flight("engine-0"))
    await asyncio.sleep(0.05)
    cut.set()
    return await task


async def _idle(world: World) -> None:
    await world.named.event.wait()
    await until(lambda: world.engines[-1].state is EngineState.READY)


def _samples(world: World) -> bool:
    return bool(world.supervisor.pool.in_flight("engine-0"))


def _of_publish(name: str) -> Step:
    return Step({name: STEP_SECONDS}, _start, World.publish, lambda world: world.is_in(name))


async def _nothing(_: World) -> None: ...


STEPS = {
    **{name: _of_publish(name) for name in ("pause", "load", "commit", "probe")},
    "trainer": Step(
        {}, _start, _publish_and_wait_for_the_trainer, lambda world: "probe" in world.supervisor._steps._seconds
    ),
    "sampling": Step(
        {"sampling": STEP_SECONDS},
        _start_and_publish,
        lambda world: world.supervisor.generate(request()),
        _samples,
    ),
    "evaluation": Step(
        {"sampling": STEP_SECONDS},
        _start_and_publish,
        lambda world: world.supervisor.generate(request(can_wait=True)),
        _samples,
    ),
    "cut": Step({"sampling": 60.0, "cut": STEP_SECONDS}, _start_and_publish, _cut, _samples),
    "idle": Step({}, _start_and_publish, _idle, lambda world: True),
}


async def break_in(step: Step, kind: str, signal: int, delay: float, folder: Path) -> tuple[float, float, str]:
    """Send the signal to a process, `delay` seconds after the step began.

    Return the seconds until that was named, those until all was well again, and the message.
    """
    async with standing_in(folder, step.slow) as world:
        await step.prepare(world)
        victim = world.find(kind)
        assert victim is not None
        acting = asyncio.create_task(step.act(world))
        await until(lambda: step.has_begun(world))
        await asyncio.sleep(delay)
        victim.send_signal(signal)
        begun = time.monotonic()
        await asyncio.wait_for(world.named.event.wait(), NAMED_SECONDS)
        await asyncio.wait_for(acting, RECOVERED_SECONDS)
        return world.named.at - begun, time.monotonic() - begun, world.named.text


async def break_start(kind: str, signal: int, delay: float, folder: Path) -> tuple[float, str]:
    """Send the signal to a starting process, `delay` seconds after it exists; return when and how that was named."""
    slow = {"start": STEP_SECONDS / 2, "prepare": STEP_SECONDS / 2, "learn_order": STEP_SECONDS / 2}
    async with standing_in(folder, slow) as world:
        starting = asyncio.create_task(world.supervisor.start(1))
        await until(lambda: world.find(kind))
        await asyncio.sleep(delay)
        victim = world.find(kind)
        assert victim is not None
        victim.send_signal(signal)
        begun = time.monotonic()
        try:
            await asyncio.wait_for(starting, NAMED_SECONDS)
        except EngineLost as error:
            world.named.take(str(error))
        else:
            # It was over just before.
            await asyncio.wait_for(world.named.event.wait(), NAMED_SECONDS)
        return world.named.at - begun, world.named.text


async def break_end(kind: str, signal: int, delay: float, folder: Path) -> float:
    """Send the signal to a process while its engine is ended; return how long the end took."""
    async with standing_in(folder, {}) as world:
        await world.supervisor.start(1)
        processes = [world.find(kind) for kind in PROCESSES]
        victim = world.find(kind)
        closing = asyncio.create_task(world.supervisor.close())
        begun = time.monotonic()
        await asyncio.sleep(delay)
        with contextlib.suppress(psutil.NoSuchProcess):
            assert victim is not None
            victim.send_signal(signal)
        await asyncio.wait_for(closing, NAMED_SECONDS)
        assert not [process for process in processes if process is not None and alive([process])]
        return time.monotonic() - begun
