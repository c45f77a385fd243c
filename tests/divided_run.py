"""Runs the rollout service with engines and replicas of a trainer in virtual time, and leaves a run's trace."""

import asyncio
import dataclasses
from pathlib import Path
from unittest import mock

from megatron_rl.observe.run_folder import SavedConfig, Value
from megatron_rl.observe.trace import COMPUTE, MAIN, Recorder, TraceFile
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.slots import divide
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.engines.scripted import Script, ScriptedFactory
from megatron_rl.sidecar.recorder import SidecarTrace
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from tests import virtual_time
from tests.sidecar.scripted_service import Memory, RewardLength, submission, weights

FOREVER = 1e9


@dataclasses.dataclass(frozen=True)
class Divided:
    """A run, and the division of its devices."""

    num_engines: int
    num_replicas: int
    group_seconds: float
    """Seconds in which a replica trains on a group."""
    num_prompts: int = 24
    group_size: int = 8
    max_running: int = 16
    lengths: tuple[int, int] = (100, 300)
    step_seconds: float = 0.01
    seconds_per_response: float = 0.0
    update_seconds: float = 0.5
    num_iterations: int = 9

    @property
    def plan(self) -> wire.Plan:
        return wire.Plan(
            num_prompts=self.num_prompts, group_size=self.group_size, num_replicas=self.num_replicas,
            micro_batch_size=self.group_size,
        )  # fmt: skip

    def describe(self) -> SavedConfig:
        """Return the run's configuration, with what an advice on its devices reads."""
        texts = {
            "loop": {"schedule": "periodic"},
            "sampling": {"tail": "stop"},
            "rollout": {"num_engines": self.num_engines, "tensor_parallel_size": 1, "colocate": "off"},
            "service": {"endpoint": "-"},
            "algorithm": {"group_size": self.group_size},
            "training": {"micro_batch_size": self.group_size},
            "iteration": {"num_replicas": self.num_replicas, "prompts_per_update": self.num_prompts},
        }
        return SavedConfig(
            num_devices=self.num_replicas,
            sections={
                section: {name: Value(str(value), "default") for name, value in values.items()}
                for section, values in texts.items()
            },
        )


def run_divided(folder: Path, run: Divided) -> float:
    """Run it, write its trace, and return the mean seconds of its iterations after the first."""
    return virtual_time.run(_run(folder, run))


async def _run(folder: Path, run: Divided) -> float:
    loop = asyncio.get_running_loop()
    with mock.patch("time.monotonic", loop.time):
        script = Script(
            lengths=run.lengths, decoding=StepCosts(run.step_seconds, run.seconds_per_response, run.max_running)
        )
        recorder = Recorder(loop.time)
        supervisor = Supervisor(ScriptedFactory(script), SupervisorConfig(max_responses=2 * run.max_running), recorder)
        await supervisor.start(run.num_engines)
        trace = SidecarTrace(folder, lambda: dict.fromkeys(supervisor.names(), run.max_running))
        trace.recorder = recorder
        service = RolloutService(supervisor, RewardLength(), Memory(keeps=False), trace=trace)
        await service.take_lease("run")
        ranks = [_Rank(folder, run, service, replica) for replica in range(run.num_replicas)]
        ends = []
        for version in range(run.num_iterations):
            await _iterate(run, service, ranks, version)
            ends.append(loop.time())
        await service.close()
        await supervisor.close()
        trace.close()
        return (ends[-1] - ends[0]) / (len(ends) - 1)


async def _iterate(run: Divided, service: RolloutService, ranks: list["_Rank"], version: int) -> None:
    await service.publish(weights(version))
    await service.submit(submission(version, run.plan, FOREVER, run.lengths[1], (version,)))
    await asyncio.gather(*(rank.train(version) for rank in ranks))
    await asyncio.sleep(run.update_seconds)
    service.complete(version)
    for rank in ranks:
        rank.end(version)


class _Rank:
    """The one rank of a replica, which asks for a slot while it computes the one before."""

    def __init__(self, folder: Path, run: Divided, service: RolloutService, replica: int) -> None:
        self._run, self._service, self._replica = run, service, replica
        self._clock = asyncio.get_running_loop().time
        self.recorder = Recorder(self._clock)
        self._file = TraceFile(folder, f"rank-{replica}", {"replica": replica, "offset": 0.0, "error": 0.0})
        self._wait = self.recorder.kind(MAIN, "wait")
        self._schedule = self.recorder.kind(MAIN, "schedule")
        self._update = self.recorder.kind(MAIN, "update")
        self._forward = self.recorder.kind(COMPUTE, "forward", role="policy", chunk=0)
        self._trained = 0.0

    async def train(self, version: int) -> None:
        num_slots = divide(self._run.plan).slots_per_replica
        asked = self._ask(version, 0)
        for index in range(num_slots):
            begun = self._clock()
            slot = await asked
            assert slot is not None
            self.recorder.add(self._wait, begun, self._clock(), index)
            if index + 1 < num_slots:
                asked = self._ask(version, index + 1)
            begun = self._clock()
            await asyncio.sleep(self._run.group_seconds)
            self.recorder.add(self._forward, begun, self._clock(), index)
        self._trained = self._clock()

    def _ask(self, version: int, index: int) -> asyncio.Task[bytes | None]:
        return asyncio.create_task(self._service.slot(version, self._replica, index, FOREVER))

    def end(self, version: int) -> None:
        # Ranks that are done wait for the others to reduce gradients.
        now = self._clock()
        self.recorder.add(self._schedule, self._trained, now - self._run.update_seconds)
        self.recorder.add(self._update, now - self._run.update_seconds, now)
        clocks = {"clocks": {"sidecar": [0.0, 0.0]}} if self._replica == 0 else {}
        self._file.write(version, self.recorder.take(), **clocks)
