"""The parts of the service's tests: scripted engines, a reward, a memory in place of a journal."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.slots import Claim
from megatron_rl.shared.records.append_file import AppendFailed
from megatron_rl.sidecar.engines import EngineLost, GroupRequest
from megatron_rl.sidecar.engines.scripted import Script, ScriptedEngine
from megatron_rl.sidecar.evaluation import Measure, measure_nothing
from megatron_rl.sidecar.group_maker import Scorer
from megatron_rl.sidecar.publication import AwaitAnswer, Proof, Published
from megatron_rl.sidecar.service import RolloutService

PLAN = wire.Plan(num_prompts=8, group_size=2, num_replicas=2, micro_batch_size=4)


class Engines:
    """Scripted engines with the interface of the pool and the supervisor: the next one in turn takes a group."""

    max_in_flight = 4
    drafts: wire.Drafts | None = None

    def __init__(self, *engines: ScriptedEngine):
        self.engines = engines
        self._turn = 0

    async def generate(self, request: GroupRequest) -> list[wire.Response]:
        for _ in self.engines:
            self._turn += 1
            try:
                return await self.engines[self._turn % len(self.engines)].generate(request)
            except EngineLost:
                continue
        raise EngineLost(f"no engine is left for {request.request_id}")

    async def sleep(self) -> None:
        for engine in self.engines:
            await engine.sleep()

    async def publish(self, weights: wire.Weights, answer: AwaitAnswer | None = None) -> Published:
        of_trainer = None if answer is None else await answer()
        proofs = []
        for engine in self.engines:
            await engine.pause()
            report = await engine.load(weights)
            await engine.commit(report)
            await engine.probe(())
            engine.open()
            proofs.append(Proof(engine.name, report))
        return Published(weights, tuple(proofs), (), of_trainer, tuple(engine.kind for engine in self.engines))

    def add(self, count: int = 1) -> list[str]:
        return []

    async def adopt(self, address: str) -> str:
        return address

    def remove(self, name: str) -> None:
        raise InputError(f"no engine has the name {name!r}")

    async def count_drafts(self) -> wire.Drafts | None:
        return self.drafts

    def status(self) -> dict[str, Any]:
        return {"engines": {e.name: {"state": str(e.state), "in_flight": 0, "restarts": 0} for e in self.engines}}


class RewardLength:
    async def score(self, group: wire.Group, chats: Any = None) -> wire.Group:
        responses = [msgspec.structs.replace(r, reward=float(len(r.tokens) // 4)) for r in group.responses]
        return wire.Group(prompt=group.prompt, responses=responses)


@dataclasses.dataclass
class Memory:
    """A memory of what a journal would keep, for as long as the test runs."""

    events: list[tuple] = dataclasses.field(default_factory=list)
    groups: list[wire.Group] = dataclasses.field(default_factory=list)
    claims: list[Claim] = dataclasses.field(default_factory=list)
    full: bool = False
    keeps: bool = True
    refuses_claims: bool = False
    refuses_end: bool = False

    def published(self, weights, reports) -> None:
        self.events.append(("published", weights.version))

    def not_proven(self, weights, wrong) -> None:
        self.events.append(("not proven", weights.version, dict(wrong)))

    def judged(self, version, mismatch) -> None:
        self.events.append(("judged", version, mismatch))

    def trained(self, version, trained) -> None:
        self.events.append(("trained", version, trained))

    def begin(self, submission) -> tuple[list[wire.Group], list[Claim]]:
        self.events.append(("submitted", submission.version))
        return list(self.groups), list(self.claims)

    def restored(self) -> None:
        self.events.append(("restored", len(self.groups)))

    def finished(self, group) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        if self.keeps:
            self.groups.append(group)

    def claimed(self, claim) -> None:
        if self.refuses_claims:
            raise AppendFailed("no room for claims")
        if self.keeps:
            self.claims.append(claim)

    def completed(self, version) -> None:
        if self.refuses_end:
            raise AppendFailed("no room for the end")
        self.events.append(("completed", version))

    def failed(self, version, reason) -> None:
        self.events.append(("failed", version))

    def evaluated(self, evaluation, groups) -> None:
        if self.full:
            raise AppendFailed("no room for evaluations")
        self.events.append(("evaluated", evaluation.version))

    def head(self) -> tuple[str, int]:
        return f"hash-{len(self.events)}", len(self.events)


def submission(
    version: int = 0, plan: wire.Plan = PLAN, deadline: float = 20.0, max_tokens: int = 8, first: Sequence[int] = (5, 6)
) -> wire.Submission:
    """Make a submission whose prompts begin with the tokens `first` and end with their numbers."""
    prompts = [
        wire.Prompt(index=index, row=f"row-{index}", tokens=wire.encode_tokens([*first, index]))
        for index in range(plan.count_submitted())
    ]
    return wire.Submission(
        run="run", version=version, fingerprint=f"weights-{version}", plan=plan,
        sampling=wire.Sampling(max_tokens=max_tokens), prompts=prompts, deadline_seconds=deadline,
    )  # fmt: skip


def evaluation(version: int = 0, num_prompts: int = 6, **changes: Any) -> wire.Evaluation:
    prompts = [
        wire.Prompt(index=index, row=f"held-out-{index}", tokens=wire.encode_tokens([7, 8, index]))
        for index in range(num_prompts)
    ]
    values = {
        "run": "run", "version": version, "fingerprint": f"weights-{version}", "prompts": prompts, "group_size": 1,
        "sampling": wire.Sampling(max_tokens=8, temperature=0.0), "deadline_seconds": 20.0, **changes,
    }  # fmt: skip
    return wire.Evaluation(**values)


def weights(version: int = 0, run: str = "run") -> wire.Weights:
    return wire.Weights(
        run=run, version=version, fingerprint=f"weights-{version}", source=wire.FileSource(folder=""), dtype="float32"
    )  # fmt: skip


def engine(name: str = "0", **script: Any) -> ScriptedEngine:
    return ScriptedEngine(name, Script(**{"lengths": (1, 8), **script}))


@contextlib.asynccontextmanager
async def serving(
    *engines: ScriptedEngine,
    memory: Any = None,
    scorer: Scorer | None = None,
    measure: Measure = measure_nothing,
    teachers: Any = None,
) -> AsyncIterator[RolloutService]:
    """Start a service that holds version 0, for the length of a test."""
    service = RolloutService(
        Engines(*(engines or (engine(),))),
        scorer or RewardLength(),
        memory or Memory(),
        measure=measure,
        teachers=teachers,
    )
    await service.take_lease("run")
    await service.publish(weights())
    try:
        async with asyncio.timeout(600):
            yield service
    finally:
        await service.close()


async def all_slots(service: RolloutService, version: int = 0, num_ranks: int = 3) -> dict[tuple[int, int], wire.Slot]:
    """Ask for every slot from every rank of every replica, in an order of its own."""
    places = [(replica, index) for replica in range(2) for index in range(2)]
    answers: dict[tuple[int, int], set[bytes]] = {place: set() for place in places}

    async def rank(seed: int) -> None:
        for place in random.Random(seed).sample(places, len(places)):
            answer = await service.slot(version, *place, patience=10)
            assert answer is not None
            answers[place].add(answer)

    await asyncio.gather(*(rank(seed) for seed in range(num_ranks)))
    assert all(len(different) == 1 for different in answers.values())
    return {place: wire.decode(different.pop(), wire.Slot) for place, different in answers.items()}


def trained(slots: dict[tuple[int, int], wire.Slot]) -> list[int]:
    return sorted(part.prompt_index for slot in slots.values() for part in slot.parts)
