"""The groups of an iteration, as the loop sees them: submitted by rank 0, given to every rank slot by slot."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.arguments.run import find_pack_multiple
from megatron_rl.config.settings import Settings
from megatron_rl.data.batch import Batcher
from megatron_rl.data.slots import Identity, IterationSlots
from megatron_rl.mcore.relay import ReceivingRank, open_relay
from megatron_rl.mcore.session import Session
from megatron_rl.ops.shared_prompt import find_backend
from megatron_rl.protocol.client import RolloutClient
from megatron_rl.protocol.slots import Division
from megatron_rl.protocol.wire import Census, Mismatch, Prompt, Sampling, Slot, Submission, decode
from megatron_rl.training.mismatch import MismatchBeyond

# Of those that were put off, in the run's last lines.
_MOST_NAMED = 5


class TakesPrompts(Protocol):
    """Where prompts come from."""

    def peek(self, count: int, num_carried: int = 0) -> list[Prompt]: ...

    def advance(
        self, count: int, num_carried: int = 0, put_off: Sequence[int] = (), rewards: Sequence[float | None] = ()
    ) -> None: ...

    @property
    def num_resting(self) -> int | None: ...

    @property
    def put_off(self) -> Sequence[str]: ...


Schedule = Callable[[IterationSlots, Session], None]
"""Waits until training may start with the slots of an iteration."""


def start_at_once(slots: IterationSlots, session: Session) -> None:
    """Do not wait: each micro-batch is waited for where it is computed, and generation goes on meanwhile."""


def wait_for_all(slots: IterationSlots, session: Session) -> None:
    """Wait until all groups are there, so that nothing overlaps: the baseline to compare with."""
    slots.wait_for_all()
    session.barrier()


SCHEDULES: dict[str, Schedule] = {"periodic": start_at_once, "sync": wait_for_all}
"""By the names of --schedule."""


class Rollouts:
    """One rank's side of all iterations."""

    def __init__(
        self,
        client: RolloutClient,
        session: Session,
        run: str,
        division: Division,
        sampling: Sampling,
        batcher: Batcher,
        schedule: Schedule,
        deadline_seconds: float,
        prompts: TakesPrompts | None,
        waiting: Callable[[int], AbstractContextManager],
        group_advantages: GroupAdvantages | None = None,
        submitting: Callable[[], AbstractContextManager] = contextlib.nullcontext,
    ):
        """`prompts` is rank 0's; the others need none. `group_advantages` learn of each iteration's mean reward.

        `submitting` is entered until every rank knows that the iteration was submitted.
        """
        self._client = client
        self._session = session
        self._run = run
        self._division = division
        self._sampling = sampling
        self._batcher = batcher
        self._schedule = schedule
        self._deadline_seconds = deadline_seconds
        self._prompts = prompts
        self._waiting = waiting
        self._submitting = submitting
        self._group_advantages = group_advantages
        self.audit_head = ""
        """The head of the sidecar's audit log when the last iteration was completed; on rank 0."""
        self._census: Census | None = None

    @contextlib.contextmanager
    def iteration(self, version: int, fingerprint: str) -> Iterator[IterationSlots]:
        """Submit an iteration and yield the slots of this rank's replica; `complete` ends the iteration."""
        identity = Identity(self._run, version, fingerprint)
        # Every rank learns of a failure. And none asks for a slot, which has a deadline, while rank 0 still evaluates.
        with self._submitting():
            self._session.run_or_raise_everywhere(lambda: self._submit(identity))
        slots = self._open_slots(identity)
        try:
            self._schedule(slots, self._session)
            yield slots
            # The next iteration's slots come over the same group.
            slots.finish()
        except MismatchBeyond as error:
            refused = error.mismatch
            # Every rank raises this, and the first one to end ends all: have it recorded before that.
            self._session.run_or_raise_everywhere(
                lambda: self._client.refuse(version, refused) if self._session.rank == 0 else None
            )
            raise
        finally:
            slots.close()

    def complete(self, version: int, mismatch: Mismatch) -> None:
        """Tell the sidecar that an iteration was trained on, and the mismatch measured of its tokens."""
        if self._session.rank == 0:
            assert self._prompts is not None
            ended = self._client.complete(version, mismatch)
            self.audit_head, self._census = ended.head, ended.census
            num_carried = self._division.plan.count_carried(len(self._prompts.put_off))
            census = ended.census
            self._prompts.advance(census.num_considered, num_carried, census.put_off, census.rewards)
        if self._group_advantages is not None and self._group_advantages.has_baseline:
            mean = None if self._census is None else self._census.reward
            self._group_advantages.baseline = self._session.broadcast(mean)

    def describe_prompts(self) -> dict[str, Any]:
        """Return metrics of what became of the last iteration's prompts; on rank 0, if flags choose among them."""
        census = self._census
        described: dict[str, Any] = {}
        if census is not None and self._division.plan.num_spare:
            described = {
                "considered": census.num_considered,
                "without_signal": census.num_without_signal,
                "reward_mean": census.reward,
            }
        if self._prompts is not None and self._prompts.num_resting is not None:
            described["resting"] = self._prompts.num_resting
        if self._prompts is not None and (self._division.plan.tail == "carry" or self._prompts.put_off):
            described["put_off"] = len(self._prompts.put_off)
        return {"prompts": described} if described else {}

    def describe_put_off(self, checkpoint: Path | None) -> str | None:
        """Count the prompts that were put off and never trained on, and name the first.

        None if there are none, and on other ranks. `checkpoint` is the last one, which holds them.
        """
        if self._prompts is None or not (put_off := self._prompts.put_off):
            return None
        plan = self._division.plan
        remedy = "no checkpoint holds them: with --save a later run could train on them"
        if checkpoint is not None:
            remedy = (
                f"{checkpoint} holds them: a run that resumes from it, with a larger --train-iters if none is left, "
                f"trains on them once {plan.num_prompts} are put off, or at once with --rollout-tail stop"
            )
        named, num_more = put_off[:_MOST_NAMED], max(0, len(put_off) - _MOST_NAMED)
        more = f" and {num_more} more, which `megatron-rl audit` lists" if num_more else ""
        return (
            f"note: {len(put_off)} prompts that --rollout-tail carry put off were not trained on, nor were their "
            f"{len(put_off) * plan.group_size} responses: {', '.join(named)}{more}. {remedy[0].upper()}{remedy[1:]}"
        )

    def _open_slots(self, identity: Identity) -> IterationSlots:
        replica, num_slots = self._session.replica, self._division.slots_per_replica
        relay = open_relay(self._session.replica_group, self._session.rank)

        def fetch(index: int) -> Slot:
            ask = functools.partial(self._client.encoded_slot, identity.version, replica, index, self._deadline_seconds)
            return decode(relay.fetch(ask), Slot)

        return IterationSlots(
            fetch,
            self._batcher,
            self._division,
            identity,
            self._session.device,
            self._waiting,
            num_ahead=num_slots if isinstance(relay, ReceivingRank) else 1,
            leave=relay.leave,
        )

    def _submit(self, identity: Identity) -> None:
        if self._session.rank != 0:
            return
        assert self._prompts is not None
        plan = self._division.plan
        num_carried = plan.count_carried(len(self._prompts.put_off))
        self._client.submit(
            Submission(
                run=identity.run,
                version=identity.version,
                fingerprint=identity.fingerprint,
                plan=plan,
                sampling=self._sampling,
                prompts=self._prompts.peek(plan.count_submitted(num_carried), num_carried),
                deadline_seconds=self._deadline_seconds,
                num_carried=num_carried,
            )
        )


def build_batcher(settings: Settings, device: torch.device, group_advantages: GroupAdvantages | None = None) -> Batcher:
    """Build the batcher that makes packs as the settings say."""
    attention = find_backend(settings.attention.backend)
    return Batcher(
        group_advantages or GroupAdvantages(settings.algorithm),
        multiple_of=find_pack_multiple(settings),
        vocab_size=settings.architecture.vocab_size,
        is_shared=settings.attention.is_shared,
        prepare=lambda layout: attention.prepare(layout, device),
        num_parts=settings.transformer.context_parallel_size,
    )
