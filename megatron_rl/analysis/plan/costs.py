"""The input of the simulator: the costs of a run's parts, in seconds, and the setting of the run."""

import dataclasses
from typing import Literal

from megatron_rl.analysis.plan.lengths import Lengths

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
    """Seconds of prefill a token, during which no response gets a token. A group's prompt is prefilled once."""
    per_prompt: float = 0.0
    max_running: int = 64
    max_in_flight: int = 128
    """Responses that the engine is given at once. Those beyond `max_running` wait in it."""
    is_chosen: bool = False
    """True if the schedules `periodic` and `sync` choose that number, at most `max_in_flight`, as the sidecar does."""

    def faster(self, factor: float) -> "BatchingCosts":
        """Return the costs of the same engine on devices that are `factor` times as fast."""
        return dataclasses.replace(
            self,
            step=self.step / factor,
            per_sequence=self.per_sequence / factor,
            per_context=self.per_context / factor,
            per_prompt_token=self.per_prompt_token / factor,
            per_prompt=self.per_prompt / factor,
        )

    def drafting(self, drafts: "DraftCosts") -> "BatchingCosts":
        """Return the mean costs of a token if each step checks a draft of every running response.

        A step reads weights and context once, and computes with all tokens of a draft and one more.
        """
        length = drafts.accepted_length
        return dataclasses.replace(
            self,
            step=self.step * (1 + drafts.num_tokens * drafts.cost) / length,
            per_sequence=self.per_sequence * (drafts.num_tokens + 1) / length,
            per_context=self.per_context / length,
        )


@dataclasses.dataclass(frozen=True)
class DraftCosts:
    """Drafts of tokens in engines."""

    acceptance: float
    """The share of tokens that are accepted, among those that follow accepted ones."""
    num_tokens: int = 4
    cost: float = 0.0
    """The time that drafting a token takes, in steps of the engine."""

    @property
    def accepted_length(self) -> float:
        """Compute the mean number of tokens that a response gets in a step: accepted ones, and one more."""
        return sum(self.acceptance**place for place in range(self.num_tokens + 1))


@dataclasses.dataclass(frozen=True)
class ScriptedCosts:
    """A scripted engine (`sidecar/engines/scripted.py`): a group's duration is fixed when the group is begun.

    The duration is a delay, plus the tokens of all of its responses over the engine's share for the group.
    """

    tokens_per_second: float | None
    delay: tuple[float, float] = (0.0, 0.0)
    """The least and the most seconds; all values between them are equally likely."""
    max_in_flight: int = 128

    def faster(self, factor: float) -> "ScriptedCosts":
        """Return the costs of an engine that is `factor` times as fast, with the same delay."""
        speed = self.tokens_per_second
        return dataclasses.replace(self, tokens_per_second=None if speed is None else speed * factor)


EngineCosts = BatchingCosts | ScriptedCosts


@dataclasses.dataclass(frozen=True)
class TrainerCosts:
    """A replica of the trainer: seconds of a micro-batch through all stages, forward and backward of the policy."""

    per_token: float
    per_micro_batch: float = 0.0
    per_pair: float = 0.0
    """Seconds of a token and one token that its attention sees."""
    backward_share: float = 2 / 3
    output_share: float = 0.0
    """The share of the output layer, all of it in the last stage."""
    exchange: float = 0.0
    """Seconds from the end of a micro-batch in a stage until the next stage has it."""
    num_frozen: int = 0
    """Models beside the policy that a micro-batch goes through, forward only: reference, old policy."""
    update: float = 0.0

    def faster(self, factor: float) -> "TrainerCosts":
        """Return the costs of the same trainer on devices that are `factor` times as fast."""
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
    """Seconds that every iteration takes besides, whatever its content."""
    reward: float = 0.0
    """Seconds of a group's reward, in one worker."""
    switch: float = 0.0
    """Colocated runs only: seconds to switch the devices from sampling to training; switching back takes the same."""


def publish_seconds(fixed: float, num_bytes: float, bytes_per_second: float) -> float:
    """Return the seconds of a publish: a fixed part, and the weights' bytes over the slowest part of their way."""
    return fixed + num_bytes / bytes_per_second


@dataclasses.dataclass(frozen=True)
class Talk:
    """The conversations of a run."""

    turns: float = 1.0
    """Mean turns of the policy in a response."""
    given_share: float = 0.0
    """The share of a response's tokens that environments write."""
    seconds: float = 0.0
    """Seconds in which an environment answers a turn."""

    @property
    def is_needed(self) -> bool:
        """Return True if responses have more than one turn, or wait for an environment."""
        return self.turns > 1 or self.seconds > 0


@dataclasses.dataclass(frozen=True)
class Setting:
    """The setting of a run."""

    schedule: Schedule
    num_prompts: int
    """Prompts of an iteration."""
    group_size: int
    micro_batch_size: int
    """Responses of a micro-batch: a multiple or a divisor of the group's size."""
    prompts: Lengths
    responses: Lengths
    num_engines: int = 1
    num_replicas: int = 1
    num_stages: int = 1
    """Number of pipeline stages."""
    num_virtual: int = 1
    """Number of virtual stages of each stage."""
    num_updates: int = 1
    trainer_devices: int = 1
    engine_devices: int = 1
    """Devices of all engines together. In a colocated run these are the trainer's, which are not counted twice."""
    is_shared: bool = True
    """True if the responses of a group follow one copy of their prompt."""
    in_prompt_order: bool = False
    reward_workers: int = 2
    staleness: int = 1
    """Asynchronous runs only: iterations for which prompts may be submitted beyond the one that is trained."""
    is_strict: bool = True
    """Asynchronous runs only: True if an iteration waits for the groups of its own prompts, so that none is older
    than `staleness` updates. If False, the groups that finish first are trained on, whatever their iteration."""
    talk: Talk = Talk()
    """The turns of responses, and their environments."""

    @property
    def num_devices(self) -> int:
        return self.trainer_devices + (0 if self.schedule == "colocated" else self.engine_devices)

    @property
    def groups_per_slot(self) -> int:
        return max(1, self.micro_batch_size // self.group_size)

    @property
    def slots_per_group(self) -> int:
        """Return the micro-batches of a group: more than 1 if a micro-batch is a part of a group."""
        return max(1, self.group_size // self.micro_batch_size)

    @property
    def units(self) -> int:
        """Return a replica's number of claims in an update. A claim takes one slot, or the slots of one group."""
        return self.num_prompts // (self.num_updates * self.num_replicas * self.groups_per_slot)

    @property
    def slots(self) -> int:
        """Return a replica's number of micro-batches in an update."""
        return self.units * self.slots_per_group
