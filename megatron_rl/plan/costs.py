"""What the parts of a run cost, in seconds, and how a run is set up: all that the simulator is told."""

import dataclasses
from typing import Literal

from megatron_rl.plan.lengths import Lengths

Schedule = Literal["colocated", "sync", "periodic", "one_step_off", "async"]
SCHEDULES: tuple[Schedule, ...] = ("colocated", "sync", "periodic", "one_step_off", "async")


@dataclasses.dataclass(frozen=True)
class BatchingCosts:
    """An engine that batches continuously: each step samples one token for every running response.

    With n responses running, which have c tokens of context in all, a step takes
    step + n * per_sequence + c * per_context.
    """

    step: float
    per_sequence: float = 0.0
    per_context: float = 0.0
    per_prompt_token: float = 0.0
    """Of prefill, during which no response gets a token. A group's prompt is prefilled once."""
    per_prompt: float = 0.0
    max_running: int = 64
    max_in_flight: int = 128
    """Responses that it is given at once: those beyond `max_running` wait in it."""

    def faster(self, factor: float) -> "BatchingCosts":
        """The same engine on devices that are so many times as fast."""
        return dataclasses.replace(
            self,
            step=self.step / factor,
            per_sequence=self.per_sequence / factor,
            per_context=self.per_context / factor,
            per_prompt_token=self.per_prompt_token / factor,
            per_prompt=self.per_prompt / factor,
        )


@dataclasses.dataclass(frozen=True)
class ScriptedCosts:
    """A scripted engine (`sidecar/engines/scripted.py`): how long a group takes is settled when it is begun.

    That is a delay, and the tokens of all of its responses over the engine's share for the group.
    """

    tokens_per_second: float | None
    delay: tuple[float, float] = (0.0, 0.0)
    """The least and the most; all between are alike."""
    max_in_flight: int = 128

    def faster(self, factor: float) -> "ScriptedCosts":
        """The same engine so many times as fast; its delay stays."""
        speed = self.tokens_per_second
        return dataclasses.replace(self, tokens_per_second=None if speed is None else speed * factor)


EngineCosts = BatchingCosts | ScriptedCosts


@dataclasses.dataclass(frozen=True)
class TrainerCosts:
    """A replica of the trainer, for a micro-batch through all of its stages, forward and backward of the policy."""

    per_token: float
    per_micro_batch: float = 0.0
    per_pair: float = 0.0
    """Of a token and a token that its attention sees."""
    backward_share: float = 2 / 3
    output_share: float = 0.0
    """The share that the output layer takes, all of it in the last stage."""
    exchange: float = 0.0
    """From the end of a micro-batch in a stage until the next stage has it."""
    num_frozen: int = 0
    """Models beside the policy that a micro-batch goes through, forward only: reference, old policy."""
    update: float = 0.0

    def faster(self, factor: float) -> "TrainerCosts":
        """The same trainer on devices that are so many times as fast."""
        return dataclasses.replace(
            self,
            per_token=self.per_token / factor,
            per_micro_batch=self.per_micro_batch / factor,
            per_pair=self.per_pair / factor,
            exchange=self.exchange / factor,
            update=self.update / factor,
        )


@dataclasses.dataclass(frozen=True)
class Costs:
    """All costs of a run."""

    engine: EngineCosts
    trainer: TrainerCosts
    publish: float = 0.0
    """Seconds from the end of an update until all engines sample with the new weights."""
    other: float = 0.0
    """Of an iteration, whatever is in it."""
    reward: float = 0.0
    """Of a group, in one of the workers."""
    switch: float = 0.0
    """From sampling to training on the same devices, and the same back: colocated runs only."""


def publish_seconds(fixed: float, num_bytes: float, bytes_per_second: float) -> float:
    """Return what a publish takes: the weights' bytes over the slowest part of their way, and what is always there."""
    return fixed + num_bytes / bytes_per_second


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a run is set up."""

    schedule: Schedule
    num_prompts: int
    """Of an iteration."""
    group_size: int
    micro_batch_size: int
    """Responses: a multiple of the group's size, or a divisor of it."""
    prompts: Lengths
    responses: Lengths
    num_engines: int = 1
    num_replicas: int = 1
    num_stages: int = 1
    """Pipeline stages."""
    num_virtual: int = 1
    """Virtual stages of each stage."""
    num_updates: int = 1
    trainer_devices: int = 1
    engine_devices: int = 1
    """Of all engines together; in a colocated run they are the trainer's, and not counted again."""
    is_shared: bool = True
    """Whether the responses of a group lie behind one copy of their prompt."""
    in_prompt_order: bool = False
    reward_workers: int = 2
    staleness: int = 1
    """Asynchronous runs only: for how many iterations beyond the one that is trained prompts may be submitted."""
    is_strict: bool = True
    """Asynchronous runs only: whether the groups of an iteration's own prompts are waited for, so that none is more
    than `staleness` updates behind. If not, the earliest finished groups are trained on, whatever they are of."""

    @property
    def num_devices(self) -> int:
        return self.trainer_devices + (0 if self.schedule == "colocated" else self.engine_devices)

    @property
    def groups_per_slot(self) -> int:
        return max(1, self.micro_batch_size // self.group_size)

    @property
    def slots_per_group(self) -> int:
        """More than 1 where a micro-batch is a part of a group."""
        return max(1, self.group_size // self.micro_batch_size)

    @property
    def units(self) -> int:
        """What a replica claims in an update: each claim is of one slot, or of one group's slots."""
        return self.num_prompts // (self.num_updates * self.num_replicas * self.groups_per_slot)

    @property
    def slots(self) -> int:
        """Micro-batches of a replica in an update."""
        return self.units * self.slots_per_group
