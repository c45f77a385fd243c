"""Measure what many conversations at once cost the service: its event loop, its memory, and the delay of a turn.

10,000 conversations take 20 turns each, with scripted engines that have room for all of them, and with environments in
processes of their own, as in a run. Groups are made, checked and kept as an iteration's. Policy and environment say 32
tokens in turn, so the last turn is sampled after 1,280 tokens. A turn takes an engine a fixed time. What comes between
the begins of two turns of a conversation beyond this time is the turn's delay.

Then agents make two calls each through the gateway, one agent after the other, with Python's HTTP client and with
OpenAI's. Measured are the time until the agent's first line and the time of the whole rollout. The memory that the
process has for itself is read before its first call and at the second one.
"""

import argparse
import asyncio
import dataclasses
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import report
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.environments.pool import EnvironmentPool
from megatron_rl.environments.types import Description, OnError
from megatron_rl.gateway.chats import NumberChats
from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.conversations import Conversations
from megatron_rl.sidecar.engines import GroupRequest
from megatron_rl.sidecar.engines.pool import EnginePool
from megatron_rl.sidecar.engines.scripted import Script, ScriptedEngine
from megatron_rl.sidecar.group_maker import Counters, GroupMaker, NoScorer
from tests.agents import CALLERS, acting
from tests.agents import Engines as AgentEngines
from tests.sidecar.scripted_service import Engines, weights

NUM_CONVERSATIONS, GROUP_SIZE, NUM_TURNS, NUM_TOKENS = 10_000, 8, 20, 32
NUM_ENGINES, NUM_WORKERS = 4, 2
TURN_SECONDS = 10.0
ENVIRONMENT = f"""
class Talk:
    def reset(self, **row):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return None if self.turns == {NUM_TURNS} else " ".join(completion.split()[::-1])

    def get_reward(self):
        return float(self.turns)
"""

NUM_ROLLOUTS = 100
CLIENTS = {"plain": "with http.client", "client": "with openai"}
"""The agents by the name of their function."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The costs of some conversations."""

    loop: float
    """Seconds of the event loop's thread, without those in which scripted engines draw tokens."""
    drawing: float
    """Seconds in which scripted engines draw tokens."""
    process: float
    """Processor seconds of the service, all threads."""
    workers: float
    """Processor seconds of the environments' processes."""
    memory: float
    """Bytes of the service at its peak, less those before the first conversation."""
    workers_memory: float
    """The same of the environments' processes."""
    delays: list[float]
    """Seconds that each turn took beyond an engine's time."""
    num_turns: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=NUM_CONVERSATIONS)
    parser.add_argument("--seconds", type=float, default=TURN_SECONDS, help="of a turn of an engine")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, to check that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.conversations, arguments.seconds = 2 * GROUP_SIZE, 0.01
    cost = measure(arguments.conversations, arguments.seconds)
    assert cost.num_turns == arguments.conversations * NUM_TURNS
    print(f"{arguments.conversations} conversations of {NUM_TURNS} turns, {arguments.seconds:g} s a turn of an engine")
    of_turn = {
        "the event loop": cost.loop,
        "scripted engines, beside it": cost.drawing,
        "all of the service's threads": cost.process,
        "the environments' processes": cost.workers,
    }
    milliseconds = {name: [1e3 * seconds / cost.num_turns] for name, seconds in of_turn.items()}
    report.table("processor time of a turn", milliseconds, "ms")
    of_conversation = {"the service": cost.memory, "the environments' processes": cost.workers_memory}
    kib = {name: [size / 1024 / arguments.conversations] for name, size in of_conversation.items()}
    report.table("memory of a conversation", kib, "KiB")
    half, most = np.quantile(cost.delays, [0.5, 0.99])
    report.table("a turn's delay", {"all turns after the first": cost.delays, "99 of 100 are below": [most]}, "s")
    num_rollouts = 2 if arguments.tiny else NUM_ROLLOUTS
    agents = {name: asyncio.run(measure_agents(name, num_rollouts)) for name in CLIENTS}
    begun = asyncio.run(measure_process())
    for number, (title, unit) in enumerate(
        (("until an agent's first line", "ms"), ("an agent's rollout of two calls", "ms"), ("its process", "MiB"))
    ):
        report.table(title, {CLIENTS[name]: rows[number] for name, rows in agents.items()}, unit)
    report.table("its process before the agent does anything", {"of its own": [begun]}, "MiB")
    report.finish(
        {
            "agent_begin_ms": float(np.median(agents["plain"][0])),
            "agent_mib": begun,
            "loop_ms_turn": milliseconds["the event loop"][0],
            "service_ms_turn": milliseconds["all of the service's threads"][0],
            "environments_ms_turn": milliseconds["the environments' processes"][0],
            "kib_conversation": kib["the service"][0],
            "delay_p50": float(half),
            "delay_p99": float(most),
        }
    )


def measure(num_conversations: int, seconds: float) -> Cost:
    """Return the costs of conversations, which a process of its own holds."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=_hold, args=(Path(folder), num_conversations, seconds, theirs)
        )
        process.start()
        theirs.close()
        try:
            return Cost(**ours.recv())
        finally:
            process.join(30)


def _hold(folder: Path, num_conversations: int, seconds: float, pipe: Pipe) -> None:
    pipe.send(dataclasses.asdict(asyncio.run(_run(folder, num_conversations, seconds))))


class _Engine(ScriptedEngine):
    """A scripted engine that counts the seconds in which it draws tokens."""

    drawing = 0.0

    def _respond(self, request: GroupRequest, sample: int) -> wire.Response:
        begun = time.thread_time()
        response = super()._respond(request, sample)
        self.drawing += time.thread_time() - begun
        return response


class _Timed:
    """Engines that note how long after its turn should have ended each conversation asks for the next."""

    max_in_flight = NUM_CONVERSATIONS

    def __init__(self, pool: EnginePool, seconds: float) -> None:
        self._pool = pool
        self._seconds = seconds
        self._due: dict[str, float] = {}
        self.delays: list[float] = []
        self.num_turns = 0

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        conversation, now = request.request_id.rpartition("-")[0], time.monotonic()
        if conversation in self._due:
            self.delays.append(max(now - self._due[conversation], 0.0))
        self._due[conversation] = now + self._seconds
        self.num_turns += 1
        return await self._pool.generate(request)


class _Work:
    """An iteration whose groups are kept, and not trained on."""

    def __init__(self, iteration: wire.Submission) -> None:
        self._prompts = iter(iteration.prompts)
        self.groups: list[wire.Group] = []

    def next_prompt(self) -> wire.Prompt | None:
        return next(self._prompts, None)

    def finished(self, group: wire.Group) -> None:
        self.groups.append(group)

    def is_wanted(self, prompt: int) -> bool:
        return True

    def missing(self) -> str:
        return "groups are missing"


async def _run(folder: Path, num_conversations: int, seconds: float) -> Cost:
    (folder / "talk.py").write_text(ENVIRONMENT)
    config = EnvironmentConfig(
        source=f"{folder / 'talk.py'}:Talk", workers=NUM_WORKERS, concurrency=num_conversations, max_turns=NUM_TURNS,
        timeout=300.0, on_error="stop",
    )  # fmt: skip
    script = Script(lengths=(NUM_TOKENS, NUM_TOKENS), delay=lambda request: seconds)
    engines = [_Engine(str(number), script) for number in range(NUM_ENGINES)]
    await Engines(*engines).publish(weights())
    timed = _Timed(EnginePool(lambda: engines, num_conversations, _lost, lambda: None), seconds)
    environments = EnvironmentPool(config)
    await environments.start()
    try:
        conversations = Conversations(
            timed, environments, NumberChats(), OnError(stops=True), Description("Talk", has_reward=True)
        )
        maker = GroupMaker(timed, NoScorer(), Counters(), None, conversations)
        iteration = _make_iteration(num_conversations // GROUP_SIZE)
        work = _Work(iteration)
        before, memory = _Usage.read(), _Usage.read()
        ended = asyncio.Event()
        watching = asyncio.create_task(_watch(ended, memory))
        reason = await maker.make_all(iteration, work)
        assert reason is None, reason
        after = _Usage.read()
        ended.set()
        await watching
    finally:
        await environments.close()
    drawing = sum(engine.drawing for engine in engines)
    return Cost(
        loop=after.loop - before.loop - drawing,
        drawing=drawing,
        process=after.process - before.process,
        workers=after.workers - before.workers,
        memory=memory.memory - before.memory,
        workers_memory=memory.workers_memory - before.workers_memory,
        delays=timed.delays,
        num_turns=timed.num_turns,
    )


class _AgentEngines(AgentEngines):
    """Engines that measure the process which calls them a second time."""

    def __init__(self, mib: list[float]) -> None:
        super().__init__()
        self._mib = mib

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        if len(self.requests) % 2:
            self._mib.append(_read_mib())
        return await super().generate(request)


def _read_mib() -> float:
    """Return the memory that the process of the only rollout shares with no other one."""
    newest = max(psutil.Process().children(recursive=True), key=lambda process: process.create_time())
    return float(newest.memory_full_info().uss) / 2**20


async def measure_process() -> float:
    """Return the MiB of the process of a rollout whose agent has begun, and waits."""
    with tempfile.TemporaryDirectory() as folder:
        async with acting(Path(folder), CALLERS, "idle") as world, world.agents.hold({}, 1) as conversation:
            address = {"base_url": "http://127.0.0.1:9/v1", "api_key": "", "model": ""}
            waiting = asyncio.create_task(conversation.call("act", 60.0, **address))
            await asyncio.sleep(0.5)
            mib = _read_mib()
            await waiting
            return mib


async def measure_agents(name: str, num_rollouts: int) -> tuple[list[float], list[float], list[float]]:
    """Return milliseconds until the first line, milliseconds of the whole, and MiB of the process, each a rollout."""
    rows: tuple[list[float], list[float], list[float]] = ([], [], [])
    with tempfile.TemporaryDirectory() as folder:
        async with acting(Path(folder), CALLERS, name, engines=_AgentEngines(rows[2])) as world:
            for _ in range(num_rollouts):
                begun = time.monotonic()
                (response,) = await world.act(on_error=OnError(stops=True))
                rows[0].append(1e3 * ((response.reward or 0.0) - begun))
                rows[1].append(1e3 * (time.monotonic() - begun))
    return rows


def _lost(*lost: Any) -> None:
    raise AssertionError(f"a scripted engine was lost: {lost}")


def _make_iteration(num_groups: int) -> wire.Submission:
    plan = wire.Plan(num_prompts=num_groups, group_size=GROUP_SIZE, num_replicas=1, micro_batch_size=GROUP_SIZE)
    sampling = wire.Sampling(max_tokens=2 * NUM_TURNS * NUM_TOKENS, max_turns=NUM_TURNS)
    tokens = wire.encode_tokens(range(64))
    prompts = [wire.Prompt(index=index, row=str(index), tokens=tokens, text="?") for index in range(num_groups)]
    return wire.Submission(
        run="run", version=0, fingerprint=weights().fingerprint, plan=plan, sampling=sampling, prompts=prompts,
        deadline_seconds=3600,
    )  # fmt: skip


@dataclasses.dataclass
class _Usage:
    """The use of processors, in seconds, and of memory, in bytes."""

    loop: float
    process: float
    workers: float
    memory: float
    workers_memory: float

    @classmethod
    def read(cls) -> "_Usage":
        workers = psutil.Process(os.getpid()).children(recursive=True)
        return cls(
            loop=time.thread_time(),
            process=time.process_time(),
            workers=sum(sum(worker.cpu_times()[:2]) for worker in workers),
            memory=psutil.Process().memory_info().rss,
            workers_memory=sum(worker.memory_info().rss for worker in workers),
        )


async def _watch(ended: asyncio.Event, peak: _Usage) -> None:
    """Follow the memory."""
    while not ended.is_set():
        now = _Usage.read()
        peak.memory, peak.workers_memory = max(peak.memory, now.memory), max(peak.workers_memory, now.workers_memory)
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    # Under its importable name, where the other process finds the function it runs.
    from benchmarks.conversations import main as importable_main

    importable_main()
