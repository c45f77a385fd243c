"""The division of an iteration's groups into slots: the same arithmetic in the trainer, the sidecar and the audit.

A single claim takes a unit: a slot of whole groups, or all the slots that one split group fills. Invariants:

- every replica has the same number of slots, num_prompts * group_size / (num_replicas * micro_batch_size);
- updates divide groups (by their numbers, `shared/protocol/selection.py`) and slots into equal runs, and a unit lies in
  one update;
- all units hold the same number of groups, and those of an update together hold all groups of the update.
"""

import dataclasses
from typing import NamedTuple

import msgspec

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import Plan


class Place(NamedTuple):
    """A micro-batch's place in an iteration."""

    replica: int
    slot: int


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The groups that a unit holds, in this order; `index` is its first slot."""

    replica: int
    index: int
    prompts: list[int]

    @property
    def place(self) -> Place:
        return Place(self.replica, self.index)


@dataclasses.dataclass(frozen=True)
class Division:
    """A plan that divides evenly, with the sizes that follow from it."""

    plan: Plan
    groups_per_unit: int
    slots_per_unit: int
    units_per_update: int
    """The units of an update in each replica."""

    @property
    def prompts_per_update(self) -> int:
        return self.plan.num_prompts // self.plan.num_updates

    @property
    def slots_per_update(self) -> int:
        """The slots of one replica: the micro-batches of one run of its schedule."""
        return self.units_per_update * self.slots_per_unit

    @property
    def slots_per_replica(self) -> int:
        return self.plan.num_updates * self.slots_per_update

    @property
    def num_units(self) -> int:
        return self.plan.num_replicas * self.plan.num_updates * self.units_per_update

    def holds(self, replica: int, index: int) -> bool:
        """Check whether the plan has this slot."""
        return 0 <= replica < self.plan.num_replicas and 0 <= index < self.slots_per_replica

    def update_of_number(self, number: int) -> int:
        """Return the update that the group of this number belongs to."""
        return number // self.prompts_per_update

    def update_of_slot(self, index: int) -> int:
        return index // self.slots_per_update

    def unit(self, replica: int, index: int) -> Place:
        """Return the first slot of the unit that a slot belongs to."""
        return Place(replica, index - index % self.slots_per_unit)

    def slots(self, unit: Place) -> list[Place]:
        return [Place(unit.replica, unit.slot + part) for part in range(self.slots_per_unit)]

    def bound_numbers(self, unit: Place) -> range:
        """Return the numbers of the groups of a unit, with order "prompt"; without spare prompts, its prompts.

        Let there be R replicas, n prompts an update and g groups a unit. Unit j of update u of replica r holds g
        numbers, from u * n + (j * R + r) * g on. So the units of all replicas advance together, and prompts that are
        sampled in order serve every replica alike.
        """
        update, rest = divmod(unit.slot, self.slots_per_update)
        place = rest // self.slots_per_unit * self.plan.num_replicas + unit.replica
        first = update * self.prompts_per_update + place * self.groups_per_unit
        return range(first, first + self.groups_per_unit)

    def bound_unit(self, number: int) -> Place:
        """Return the unit that the group of this number belongs to, with order "prompt"."""
        update, rest = divmod(number, self.prompts_per_update)
        place, replica = divmod(rest // self.groups_per_unit, self.plan.num_replicas)
        return Place(replica, update * self.slots_per_update + place * self.slots_per_unit)

    def find_problem(self, claim: Claim) -> str | None:
        """Say why the form of a claim does not fit this plan, whatever groups it takes; None if it fits."""
        name = f"slot ({claim.replica}, {claim.index})"
        if not self.holds(*claim.place):
            replicas, slots = self.plan.num_replicas, self.slots_per_replica
            return f"{name} is not among the {slots} slots of {replicas} replicas"
        if claim.index % self.slots_per_unit:
            return f"{name} is not the first of its group's {self.slots_per_unit} slots"
        if len(claim.prompts) != self.groups_per_unit:
            return f"{name} takes {len(claim.prompts)} groups, and {self.groups_per_unit} belong in it"
        return None


def divide(plan: Plan) -> Division:
    """Divide a plan into slots; the InputError names the flag that keeps it from dividing evenly."""
    for name in ("num_prompts", "group_size", "num_replicas", "micro_batch_size", "num_updates"):
        if getattr(plan, name) < 1:
            raise InputError(f"{name} of the plan must be at least 1, not {getattr(plan, name)}")
    if plan.num_spare < 0:
        raise InputError(f"num_spare of the plan must be at least 0, not {plan.num_spare}")
    _check_tail(plan)
    prompts, group_size, micro_batch = plan.num_prompts, plan.group_size, plan.micro_batch_size
    if micro_batch % group_size and group_size % micro_batch:
        raise InputError(
            f"--micro-batch-size {micro_batch} is neither a multiple nor a divisor of --grpo-group-size {group_size}: "
            "a micro-batch holds whole groups, or an equal part of one"
        )
    if prompts % plan.num_updates:
        raise InputError(
            f"--grpo-prompts-per-step {prompts} does not divide into {plan.num_updates} updates: "
            f"set --global-batch-size to {prompts * group_size} (one update) or to a multiple of --grpo-group-size "
            f"{group_size} that divides it"
        )
    of_update = prompts // plan.num_updates
    groups_per_unit = max(1, micro_batch // group_size)
    units, remainder = divmod(of_update, plan.num_replicas * groups_per_unit)
    if remainder:
        step = plan.num_replicas * groups_per_unit
        raise InputError(
            f"{of_update} groups an update do not divide over {plan.num_replicas} replicas with {groups_per_unit} in "
            f"a micro-batch: make --grpo-prompts-per-step a multiple of {step * plan.num_updates} (it is {prompts}), "
            f"--global-batch-size one of {step * group_size}, or --micro-batch-size smaller (it is {micro_batch})"
        )
    return Division(
        plan=plan,
        groups_per_unit=groups_per_unit,
        slots_per_unit=max(1, group_size // micro_batch),
        units_per_update=units,
    )


def _check_tail(plan: Plan) -> None:
    if plan.tail == "stop":
        return
    if not 1 <= plan.num_tail <= plan.num_prompts:
        raise InputError(
            f"--rollout-tail-groups {plan.num_tail} must be from 1 to --grpo-prompts-per-step, which is "
            f"{plan.num_prompts}"
        )
    if plan.order == "prompt":
        raise InputError(
            f"--rollout-tail {plan.tail} depends on which groups finish last, and --consume-order prompt must not: "
            "write --consume-order completion, or --rollout-tail stop"
        )
    if plan.num_spare:
        raise InputError(
            f"--rollout-tail {plan.tail} depends on which groups finish last, and "
            "--grpo-filter-groups-with-same-reward must not: leave one out"
        )
    if plan.tail == "carry" and plan.num_updates > 1:
        raise InputError(
            f"--rollout-tail carry must have one update an iteration, not {plan.num_updates}: short responses would "
            f"fill the first; set --global-batch-size to {plan.num_prompts * plan.group_size}"
        )
