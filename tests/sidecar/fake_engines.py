"""Engines that fail as a test says, and the factory that makes them; no processes."""

import asyncio
import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from megatron_rl.shared.protocol.wire import (
    EngineKind,
    FileSource,
    ProbeAnswer,
    Response,
    Sampling,
    StreamSource,
    Weights,
    encode_log_probs,
)
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.engines import (
    EngineLost,
    EngineRefused,
    EngineState,
    GroupRequest,
    ProbeReport,
    WeightReport,
    WeightsNotWritten,
    WrongWeights,
)
from megatron_rl.sidecar.engines.scripted import Script, ScriptedEngine

STEPS = ("pause", "load", "commit", "probe")


class FakeEngine(ScriptedEngine):
    """A scripted engine that is started, closed, and fails by plan."""

    def __init__(self, name: str, factory: "FakeFactory") -> None:
        super().__init__(name, Script(lengths=(4, 4)))
        self.state = EngineState.STARTING
        self.stream_place: streams.StreamPlace | None = None
        self.num_workers = 2
        self.is_closed = self.is_asleep = False
        self.steps: list[str] = []
        self.blocked: asyncio.Event | None = None
        self.go_on = asyncio.Event()
        """The event that ends a hang."""
        self._factory = factory
        self._sampled_with = factory.checkpoint

    async def start(self) -> None:
        await self._fail("start")
        self.state = EngineState.WAITING

    async def close(self) -> None:
        self.is_closed = True
        await super().close()

    def last_words(self) -> str:
        return f"last words of {self.name}"

    async def find_fault(self) -> str | None:
        is_alive = not self.is_closed and self.state is not EngineState.DEAD and not self._factory.killed[self.name]
        return None if is_alive else "its process ended without a message"

    async def generate(self, request: GroupRequest) -> list[Response]:
        await self._fail("generate")
        self._factory.served[self.name].append(request.request_id)
        if self.blocked is not None:
            await self.blocked.wait()
        if self._factory.killed[self.name]:
            raise EngineLost(f"engine {self.name} was killed")
        return await super().generate(request)

    async def sleep(self) -> None:
        await self._step("sleep")
        await super().sleep()
        self.is_asleep = True

    async def load(self, weights: Weights) -> WeightReport:
        self.is_asleep = False
        report = await super().load(weights)
        if self.name in self._factory.found_out:
            raise WrongWeights(f"engine {self.name} holds other numbers than were given")
        # An engine that reports the version it was told of, and samples with something else.
        self._sampled_with = self._factory.keeps.get(self.name, self._sampled_with)
        if self.name in self._factory.corrupt:
            return WeightReport(weights.version, "another fingerprint")
        num_compared, num_parameters = self._factory.compares.get(self.name, (0, 0))
        return dataclasses.replace(
            report, num_compared=num_compared, num_parameters=num_parameters, uncompared=("layers.0.weight",)
        )

    async def probe(self, tokens: Sequence[int]) -> ProbeReport:
        report = await super().probe(tokens)
        version = self._factory.says_of_tokens.get(self.name)
        if version is None:
            return report
        spans = [msgspec.structs.replace(span, version=version) for span in report.response.spans]
        return ProbeReport(report.log_probs, msgspec.structs.replace(report.response, spans=spans))

    @property
    def kind(self) -> EngineKind:
        return EngineKind()

    async def _step(self, step: Any) -> None:
        self.steps.append(step)
        await self._fail(step)

    async def _fail(self, step: str) -> None:
        if self._factory.faults[self.name, step]:
            fault = self._factory.faults[self.name, step].popleft()
            if fault == "hang":
                await self.go_on.wait()
            if fault == "lost":
                raise EngineLost(f"engine {self.name} is lost at {step}")
            if fault == "not written":
                raise WeightsNotWritten("the trainer ended before it had written 3 tensors: a, b, c")
            if fault == "refused":
                raise EngineRefused(f"engine {self.name} refuses {step}")


class FakeFactory:
    """A maker of fake engines; its plan for a name holds for every engine of that name."""

    def __init__(self) -> None:
        self.made: collections.defaultdict[str, list[FakeEngine]] = collections.defaultdict(list)
        self.faults: collections.defaultdict[tuple[str, str], collections.deque[str]] = collections.defaultdict(
            collections.deque
        )
        self.checkpoint = ""
        """The fingerprint of the weights that engines start with."""
        self.keeps: dict[str, str] = {}
        self.found_out: set[str] = set()
        """Names of engines that find, after a load, that they hold other weights."""
        self.corrupt: set[str] = set()
        self.compares: dict[str, tuple[int, int]] = {}
        """The numbers of parameters that an engine can compare with the published ones, and of all, by engine."""
        self.says_of_tokens: dict[str, str] = {}
        """The version by which an engine says that it sampled the tokens after a probe, by engine."""
        self.killed: collections.Counter[str] = collections.Counter()
        self.served: collections.defaultdict[str, list[str]] = collections.defaultdict(list)
        self.released: list[str] = []

    def create(self, name: str) -> FakeEngine:
        if self.faults[name, "create"]:
            self.faults[name, "create"].popleft()
            raise OSError(11, f"no process for {name}")
        self.killed[name] = 0
        self.made[name].append(FakeEngine(name, self))
        return self.made[name][-1]

    def adopt(self, name: str, address: str) -> FakeEngine:
        return self.create(name)

    def release(self, name: str) -> None:
        self.released.append(name)

    def fail(self, name: str, step: str, *faults: str) -> None:
        self.faults[name, step].extend(faults)

    def engine(self, name: str) -> FakeEngine:
        """Return the engine that has the name now."""
        return self.made[name][-1]


def weights(version: int, location: str = "", fingerprint: str = "") -> Weights:
    return Weights(
        run="run", version=version, fingerprint=fingerprint or f"weights-{version}", source=FileSource(folder=location),
        dtype="float32",
    )  # fmt: skip


def request(number: int, group_size: int = 2) -> GroupRequest:
    return GroupRequest(f"group-{number}", (1, 2, number), group_size, 1000 * number, Sampling(max_tokens=8))


async def answer(
    weights: Weights, sampled_with: str = "", bound: float | None = None, agreement: float | None = None
) -> ProbeAnswer:
    """Return the trainer's answer for these weights: the answer of a fake engine with them."""
    of_weights = ScriptedEngine("trainer")
    of_weights._sampled_with = sampled_with or weights.fingerprint
    log_probs = (await of_weights.probe(())).log_probs
    return ProbeAnswer(
        run="run", version=weights.version, fingerprint=weights.fingerprint, dtype="float32", bound=bound,
        agreement=agreement, log_probs=encode_log_probs(log_probs),
    )  # fmt: skip


def streamed(version: int, num_workers: int, address: str = "host:1") -> Weights:
    """Describe a version that rank 0 sends to this number of workers."""
    manifest = [("weight", "float32", [1])]
    source = StreamSource(transport="nccl", address=address, manifest=manifest, world_size=1 + num_workers)
    return msgspec.structs.replace(weights(version), source=source, fingerprint=f"f{version}")
