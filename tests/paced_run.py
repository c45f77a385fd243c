"""Runs iterations of the rollout service in virtual time: scripted engines sample, and a trainer takes the slots."""

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable

from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.slots import divide
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.engines.scripted import Script, ScriptedFactory
from megatron_rl.sidecar.in_flight.control import Pacer
from megatron_rl.sidecar.in_flight.curve import GroupLife, StepCurve
from megatron_rl.sidecar.in_flight.forecast import Opening
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from tests import virtual_time
from tests.sidecar.scripted_service import Memory, RewardLength, submission, weights

FOREVER = 1e9


def build_line(step: float, per_response: float, most: int) -> StepCurve:
    """Build the curve of an engine whose costs are known: a step with n responses takes step + n * per_response."""
    return StepCurve((1.0, float(most)), (step + per_response, step + per_response * most), (step, per_response))


@dataclasses.dataclass(frozen=True)
class Case:
    """An iteration, repeated, and the engines and the trainer that work on it."""

    costs: StepCosts
    num_prompts: int
    group_size: int
    lengths: tuple[int, int]
    """The least and the most tokens of a response."""
    train_seconds: float
    """Seconds that the trainer computes in an iteration."""
    num_engines: int = 1
    groups_per_slot: int = 1
    num_updates: int = 1
    order: wire.Order = "completion"
    tail: wire.Tail = "stop"
    num_tail: int = 0

    @property
    def most(self) -> int:
        """The most responses in flight on an engine."""
        return 2 * self.costs.max_running

    @property
    def plan(self) -> wire.Plan:
        return wire.Plan(
            num_prompts=self.num_prompts, group_size=self.group_size, num_replicas=1,
            micro_batch_size=self.groups_per_slot * self.group_size, num_updates=self.num_updates, order=self.order,
            tail=self.tail, num_tail=self.num_tail,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PacedIteration:
    """An iteration that was run."""

    seconds: float
    """Seconds from its submission until the trainer has done with it."""
    opening: Opening
    """The responses that the engines were given at once."""
    slots: str
    """A hash of all slots, in order."""
    lengths: list[list[int]]
    """The tokens of each response, by prompt."""


def run_paced(
    case: Case,
    num_iterations: int,
    fixed: Opening | None = None,
    on_sampled: Callable[[GroupLife], None] = lambda life: None,
) -> list[PacedIteration]:
    """Run iterations with chosen openings, or with a fixed one; `on_sampled` is told of each group."""
    return virtual_time.run(_run(case, num_iterations, fixed, on_sampled))


class _ToldPacer(Pacer):
    def __init__(self, most: int, max_running: int, on_sampled: Callable[[GroupLife], None]) -> None:
        super().__init__(most, max_running)
        self._on_sampled = on_sampled

    def sampled(self, life: GroupLife) -> None:
        super().sampled(life)
        self._on_sampled(life)


async def _run(
    case: Case, num_iterations: int, fixed: Opening | None, on_sampled: Callable[[GroupLife], None]
) -> list[PacedIteration]:
    script = Script(lengths=case.lengths, decoding=case.costs)
    supervisor = Supervisor(ScriptedFactory(script), SupervisorConfig(max_responses=case.most))
    await supervisor.start(case.num_engines)
    pacer = _ToldPacer(case.most, case.costs.max_running, on_sampled)
    if fixed is not None:
        pacer.opening = fixed
    supervisor.pool.pacing = pacer
    pacer.on_room = supervisor.pool.engines_changed
    service = RolloutService(supervisor, RewardLength(), Memory(keeps=False), pacer=pacer)
    await service.take_lease("run")
    try:
        # Without the trainer's seconds the pacer learns nothing, and the opening stays.
        told = case.train_seconds if fixed is None else None
        return [await _iterate(case, service, pacer, version, told) for version in range(num_iterations)]
    finally:
        await service.close()
        await supervisor.close()


async def _iterate(
    case: Case, service: RolloutService, pacer: Pacer, version: int, told: float | None
) -> PacedIteration:
    await service.publish(weights(version))
    clock = asyncio.get_running_loop().time
    asked_for = submission(version, case.plan, FOREVER, case.lengths[1], (version,))
    await service.submit(asked_for)
    opening, begun = pacer.opening, clock()
    digest, lengths = hashlib.sha256(), [[0]] * len(asked_for.prompts)
    num_slots = divide(case.plan).slots_per_replica
    # The trainer asks for a slot while it computes the one before.
    asked = asyncio.create_task(service.slot(version, 0, 0, FOREVER))
    for index in range(num_slots):
        slot = await asked
        assert slot is not None
        digest.update(slot)
        for part in wire.decode(slot, wire.Slot).parts:
            lengths[part.prompt_index] = [len(response.tokens) // 4 for response in part.responses]
        if index + 1 < num_slots:
            asked = asyncio.create_task(service.slot(version, 0, index + 1, FOREVER))
        await asyncio.sleep(case.train_seconds / num_slots)
    ended = clock()
    mismatch = wire.Mismatch(mean=0.0, largest=0.0, bound=None)
    service.complete(version, None if told is None else wire.Trained(version=version, mismatch=mismatch, seconds=told))
    return PacedIteration(ended - begun, opening, digest.hexdigest(), lengths)
