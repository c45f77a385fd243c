"""The state of one iteration: prompts still to sample, groups that are finished, and the slots that claimed them.

Pure Python: no I/O of its own, no clock, no tasks. Every answer follows from the order of the events. Invariants:

1. A slot's first request asks for the next finished groups. Requests that find too few groups wait in order, and a
   finished group serves the request that has waited longest.
2. With order "completion" a slot of an update takes that update's groups in the order in which they finished. With
   order "prompt" it takes the groups that are bound to it, in the order of their numbers.
3. A slot takes only groups that the selection has bound to its update, or to itself (`shared/protocol/selection.py`).
   With spare prompts, the groups that are trained on do not depend on which finished first. They do only where the last
   groups are put off.
4. No slot waits while the groups that it would take are finished and bound.
5. All answers for a slot have the same bytes.
6. No group is claimed twice. When every slot has been answered, every group that is trained on has been claimed.
7. A split group's slots are claimed by the first request for any of them, hold its responses in order, and carry the
   rewards of all of them.
8. A group is recorded before it counts as finished, a claim before it can be answered, the end before the iteration is
   over. An event that cannot be recorded has not happened, and the iteration has failed.
9. A group is waiting, running, finished or claimed, and finishes once. Its maker has already compared it with the
   submission.
10. An iteration that failed answers nothing but its failure.
"""

import dataclasses
import enum
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.selection import Binding, clip_rewards, has_signal, open_selection
from megatron_rl.shared.protocol.slots import Claim, Place, divide
from megatron_rl.shared.protocol.turns import divide_reward, list_rewards
from megatron_rl.shared.protocol.wire import Census, Group, GroupPart, Prompt, Slot, Submission, Unscored


class WrongVersion(MegatronRLError):
    """A request names another version than the iteration's."""


class NoSuchSlot(MegatronRLError):
    """A request is for a slot that the plan does not have."""


class IterationFailed(MegatronRLError):
    """The iteration cannot be finished."""


class GroupFinishedTwice(MegatronRLError):
    """A group that had finished has finished again: the second one is not used."""


class NotAllClaimed(MegatronRLError):
    """The trainer reports the iteration complete, but has not asked for all of its groups."""


class ClaimConflict(MegatronRLError):
    """A claim to restore contradicts the groups or the other claims."""


class GroupState(enum.StrEnum):
    """The progress of a group of an iteration."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CLAIMED = "claimed"


@dataclasses.dataclass
class _Queue:
    """Finished groups, and the units that may take them: those of one update or, with order "prompt", one unit."""

    # The keys of both are sets in the order of insertion.
    finished: dict[int, None] = dataclasses.field(default_factory=dict)
    asked: dict[Place, None] = dataclasses.field(default_factory=dict)


class Iteration:
    """The state machine."""

    def __init__(
        self,
        submission: Submission,
        record_group: Callable[[Group], None] = lambda group: None,
        record_claim: Callable[[Claim], None] = lambda claim: None,
        record_end: Callable[[], None] = lambda: None,
        before: tuple[int, int] | None = (0, 0),
    ) -> None:
        """Begin an iteration. Each `record_` function is called before a group, a claim or the end takes effect.

        `before` counts groups of the iteration before: those without a signal, and all that were considered. The number
        of prompts to sample ahead follows from it, and not the selection. With None, no prompts are sampled ahead.
        """
        self.submission = submission
        self.division = divide(submission.plan)
        self.failure: str | None = None
        self.claims: list[Claim] = []
        self._is_complete = False
        self._record_group = record_group
        self._record_claim = record_claim
        self._record_end = record_end
        num_prompts = submission.plan.count_submitted(submission.num_carried)
        if [prompt.index for prompt in submission.prompts] != list(range(num_prompts)):
            raise InputError(
                f"the {num_prompts} prompts of the plan must have indices 0 to {num_prompts - 1}, in order"
            )
        if submission.num_carried > submission.plan.num_prompts:
            raise InputError(
                f"{submission.num_carried} prompts that were put off are more than the "
                f"{submission.plan.num_prompts} of an iteration"
            )
        self._selection = open_selection(self.division, submission.num_carried)
        self._before = before
        self._next = 0
        # Finished groups that are not bound yet, as keys, in the order in which they finished.
        self._unbound: dict[int, None] = {}
        # The mean reward of each finished group, None if none of it is scored, and whether it has a signal.
        self._seen: dict[int, tuple[float | None, bool]] = {}
        self._states = [GroupState.WAITING] * num_prompts
        self._counts = dict.fromkeys(GroupState, 0) | {GroupState.WAITING: num_prompts}
        self._groups: dict[int, Group] = {}
        self._queues: defaultdict[Binding, _Queue] = defaultdict(_Queue)
        self._answers: dict[Place, bytes] = {}

    @property
    def version(self) -> int:
        return self.submission.version

    @property
    def is_claimed(self) -> bool:
        """True once every group that is trained on was claimed."""
        return self._counts[GroupState.CLAIMED] == self.submission.plan.num_prompts

    @property
    def is_over(self) -> bool:
        """True if the iteration has failed, or the trainer has trained on all of it."""
        return self.failure is not None or self._is_complete

    def is_same(self, submission: Submission) -> bool:
        """Check whether the iteration works on this submission; a failed one works on none."""
        return self.failure is None and self.submission == submission

    def restore(self, groups: Iterable[Group], claims: Iterable[Claim]) -> None:
        """Take over a journal's groups and claims, in order and before any other event, and do not record them."""
        for group in groups:
            self._check_finished(group)
            self._finish(group)
        for claim in claims:
            problem = self._selection.find_problem(claim) or self._conflict(claim)
            if problem:
                raise ClaimConflict(
                    f"a claim of version {self.version} cannot be restored: {problem}; move its journal away and "
                    "resume from the checkpoint"
                )
            self._take(claim)

    def next_prompt(self) -> Prompt | None:
        """Return the next prompt to sample, and count it as running; None if no prompt is wanted now."""
        while self._next < len(self._states):
            prompt = self._next
            if self._states[prompt] is GroupState.WAITING:
                if not self._selection.is_wanted(prompt, self._num_ahead()):
                    return None
                self._move(prompt, GroupState.RUNNING)
                self._next += 1
                return self.submission.prompts[prompt]
            self._next += 1
        return None

    def is_wanted(self, prompt: int) -> bool:
        """Check whether a running prompt may still be trained on; if not, it no longer counts as running."""
        is_all = len(self._states) == self.submission.plan.num_prompts
        is_wanted = is_all or self._selection.is_wanted(prompt)
        if not is_wanted and self._states[prompt] is GroupState.RUNNING:
            self._move(prompt, GroupState.WAITING)
        return is_wanted

    def finished(self, group: Group) -> list[Place]:
        """Take a finished group; return the slots that were asked for earlier and can be answered now.

        If the group had finished before, raise GroupFinishedTwice and change nothing.
        """
        self._check_failure()
        self._check_finished(group)
        self._record(self._record_group, group)
        return [place for queue in self._finish(group) for place in self._serve(queue)]

    def failed(self, reason: str) -> None:
        """Fail the iteration; the first reason stays."""
        self.failure = reason if self.failure is None else self.failure

    def complete(self) -> None:
        """End the iteration after the trainer has trained on all groups; its slots are still answered."""
        self._check_failure()
        if not self.is_claimed:
            raise NotAllClaimed(f"iteration {self.version} cannot be complete: {self.missing()}")
        if not self._is_complete:
            self._record(self._record_end)
            self._is_complete = True

    def claim(self, replica: int, index: int, version: int | None = None) -> bytes | None:
        """Return the encoded `wire.Slot` of this place; None, with the request queued, while it cannot be answered."""
        unit = self._checked_unit(replica, index, version)
        place = Place(replica, index)
        if place not in self._answers:
            queue = self._queue_of_unit(unit)
            queue.asked[unit] = None
            self._serve(queue)
        return self._answers.get(place)

    def census(self) -> Census:
        """Count the outcomes of the prompts, once all is settled."""
        num_considered, put_off = self._selection.num_considered, self._selection.put_off()
        late = set(put_off)
        all_seen = [None if prompt in late else self._seen[prompt] for prompt in range(num_considered)]
        seen = [one for one in all_seen if one is not None]
        rewards = [reward for reward, _ in seen if reward is not None]
        return Census(
            num_considered=num_considered,
            num_without_signal=sum(not has for _, has in seen),
            reward=math.fsum(rewards) / max(len(rewards), 1),
            put_off=put_off,
            rewards=[None if one is None else one[0] for one in all_seen],
        )

    def prompts_in(self, state: GroupState) -> list[int]:
        """List the prompts whose groups are in this state."""
        return [prompt for prompt, reached in enumerate(self._states) if reached is state]

    def counts(self) -> dict[GroupState, int]:
        """Return the number of groups in each state."""
        return dict(self._counts)

    def asked(self) -> list[Place]:
        """List the units that wait, by their first slots; those of one update are in the order of requests."""
        return [unit for queue in self._queues.values() for unit in queue.asked]

    def missing(self) -> str:
        """Describe the groups that are missing until the iteration can end."""
        num_prompts = self.submission.plan.num_prompts
        unfinished = [
            prompt
            for prompt in self.prompts_in(GroupState.RUNNING) + self.prompts_in(GroupState.WAITING)
            if self._selection.is_wanted(prompt, 0)
        ]
        num_unfinished = min(len(unfinished), num_prompts)
        shown = ", ".join(map(str, unfinished[:8])) + (", ..." if len(unfinished) > 8 else "")
        which = f" (prompts {shown})" if unfinished else ""
        num_without = self._num_without() if self.submission.plan.num_spare else 0
        without = f", {num_without} had no signal" if num_without else ""
        num_ready = sum(len(queue.finished) for queue in self._queues.values())
        return (
            f"{num_unfinished} of {num_prompts} groups are not finished{which}{without}, "
            f"{num_ready} finished ones are not claimed"
        )

    def status(self) -> dict[str, Any]:
        """Return the state, for /v1/status."""
        return {
            "version": self.version,
            "failure": self.failure,
            "is_complete": self._is_complete,
            "groups": {state.value: count for state, count in self._counts.items()},
            "running": self.prompts_in(GroupState.RUNNING),
            "slots_waiting": [list(unit) for unit in self.asked()],
            "num_units_claimed": len(self.claims),
            "num_units": self.division.num_units,
        }

    def _check_failure(self) -> None:
        if self.failure is not None:
            raise IterationFailed(f"iteration {self.version} failed: {self.failure}")

    def _check_finished(self, group: Group) -> None:
        prompt = group.prompt.index
        if self._states[prompt] in (GroupState.FINISHED, GroupState.CLAIMED):
            raise GroupFinishedTwice(f"the group of prompt {prompt} of version {self.version} finished twice")

    def _checked_unit(self, replica: int, index: int, version: int | None) -> Place:
        if version not in (None, self.version):
            raise WrongVersion(
                f"a slot of version {version} was asked for, and the iteration has version {self.version}"
            )
        if not self.division.holds(replica, index):
            raise NoSuchSlot(
                f"slot ({replica}, {index}) was asked for, and iteration {self.version} has "
                f"{self.division.slots_per_replica} slots for each of {self.submission.plan.num_replicas} replicas: "
                "the trainer and the submission must have the same plan"
            )
        self._check_failure()
        return self.division.unit(replica, index)

    def _queue_of_unit(self, unit: Place) -> _Queue:
        is_bound = self.submission.plan.order == "prompt"
        return self._queues[unit if is_bound else self.division.update_of_slot(unit.slot)]

    def _num_without(self) -> int:
        return sum(not has for _, has in self._seen.values())

    def _num_ahead(self) -> int:
        """Estimate the prompts that are needed beyond those that are enough if all groups have a signal.

        If a share s of groups has no signal, n groups with one take n / (1 - s) groups.
        """
        if self._before is None or not self.submission.plan.num_spare:
            return 0
        num_without, num_seen = self._before[0] + self._num_without(), self._before[1] + len(self._seen)
        return self._selection.num_open * num_without // max(num_seen - num_without, 1)

    def _move(self, prompt: int, state: GroupState) -> None:
        self._counts[self._states[prompt]] -= 1
        self._counts[state] += 1
        self._states[prompt] = state

    def _finish(self, group: Group) -> list[_Queue]:
        """Take in a group; return the queues of all groups that are bound from now on."""
        prompt = group.prompt.index
        self._groups[prompt] = group
        rewards = clip_rewards(list_rewards(group.responses), self.submission.plan)
        has = has_signal(group.responses, self.submission.plan)
        self._seen[prompt] = (math.fsum(rewards) / len(rewards) if rewards else None, has)
        self._move(prompt, GroupState.FINISHED)
        self._selection.learn(prompt, has)
        self._unbound[prompt] = None
        bindings: dict[Binding, None] = {}
        for finished in list(self._unbound):
            binding = self._selection.find_binding(finished)
            if binding is not None:
                del self._unbound[finished]
                self._queues[binding].finished[finished] = None
                bindings[binding] = None
        return [self._queues[binding] for binding in bindings]

    def _record(self, record: Callable[..., None], *what: object) -> None:
        try:
            record(*what)
        except Exception as error:
            # One of several records may have been written. To continue could claim these groups for a second slot.
            self.failed(f"the journal cannot be written: {error}")
            raise

    def _serve(self, queue: _Queue) -> list[Place]:
        served: list[Place] = []
        while queue.asked and len(queue.finished) >= self.division.groups_per_unit:
            unit = next(iter(queue.asked))
            prompts = list(itertools.islice(queue.finished, self.division.groups_per_unit))
            if self.submission.plan.order == "prompt":
                prompts = self._selection.sort(prompts)
            claim = Claim(replica=unit.replica, index=unit.slot, prompts=prompts)
            self._record(self._record_claim, claim)
            self._take(claim)
            served += self.division.slots(unit)
        return served

    def _conflict(self, claim: Claim) -> str | None:
        if claim.place in self._answers:
            return f"slot ({claim.replica}, {claim.index}) is claimed twice"
        for prompt in claim.prompts:
            problem = f"slot ({claim.replica}, {claim.index}) takes the group of prompt {prompt}"
            if self._states[prompt] is not GroupState.FINISHED:
                return f"{problem}, which is {self._states[prompt]}"
            if claim.prompts.count(prompt) > 1:
                return f"{problem} more than once"
        return None

    def _take(self, claim: Claim) -> None:
        # Encoded now and kept only as the bytes of the answer, so that groups are not held twice.
        groups = [self._groups[prompt] for prompt in claim.prompts]
        for place, parts in zip(self.division.slots(claim.place), self._parts(groups), strict=True):
            self._answers[place] = wire.encode(
                Slot(
                    run=self.submission.run,
                    version=self.version,
                    fingerprint=self.submission.fingerprint,
                    replica=place.replica,
                    index=place.slot,
                    parts=parts,
                )
            )
        queue = self._queue_of_unit(claim.place)
        queue.asked.pop(claim.place, None)
        for prompt in claim.prompts:
            del self._groups[prompt], queue.finished[prompt]
            self._move(prompt, GroupState.CLAIMED)
        self.claims.append(claim)

    def _parts(self, groups: Sequence[Group]) -> list[list[GroupPart]]:
        """Return the parts that each slot of a unit holds."""
        group_size = self.submission.plan.group_size
        size = min(self.submission.plan.micro_batch_size, group_size)
        has_turns = self.submission.sampling.max_turns > 0
        return [[_part(group, first, size, has_turns) for group in groups] for first in range(0, group_size, size)]


def _part(group: Group, first: int, size: int, has_turns: bool) -> GroupPart:
    # Once in a part, whichever of the group's responses are in it.
    head = group.responses[0]
    taken, before = group.responses[first : first + size], list_rewards(group.responses[:first])
    scored = [response for response in group.responses if response.reward is not None]
    teacher = group.prompt.columns.get("teacher")
    # Those of agents may have different ones.
    names = dict.fromkeys(name for response in scored for name in response.components)
    return GroupPart(
        prompt_index=group.prompt.index,
        row=group.prompt.row,
        prompt_tokens=group.prompt.tokens,
        begins=first == 0,
        first_response=len(before),
        responses=[
            msgspec.structs.replace(response, prompt_experts=msgspec.UNSET)
            for response in taken
            if response.reward is not None
        ],
        unscored=[
            Unscored(cause=response.cause, failure=response.failure, refilled=response.refilled)
            for response in taken
            if response.reward is None
        ],
        rewards=list_rewards(scored),
        turn_rewards=[divide_reward(response) for response in scored] if has_turns else [],
        components={name: [response.components.get(name) for response in scored] for name in names},
        prompt_experts=head.prompt_experts,
        teacher=teacher if isinstance(teacher, str) else None,
    )
