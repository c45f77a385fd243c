"""The groups of an iteration: rank 0 submits their prompts, and every rank gets them slot by slot."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.roles.teacher import TEACHER
from megatron_rl.command_line.describe import describe_objective, describe_own_files
from megatron_rl.command_line.run import RunSettings, find_pack_multiple
from megatron_rl.config.settings import Settings
from megatron_rl.observe.metrics import (
    ACCEPTED,
    ACCEPTED_LENGTH,
    DRAFTED,
    ENVIRONMENT_MEAN,
    ENVIRONMENT_P95,
    MAX_IN_FLIGHT,
    TIME,
)
from megatron_rl.observe.timeline import Timeline
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.slots import Division
from megatron_rl.shared.protocol.wire import Census, Drafts, Mismatch, Sampling, Slot, Submission, decode
from megatron_rl.trainer.data.batch import Batcher, build_preparation
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.prompts import PromptSource
from megatron_rl.trainer.data.slots import Identity, IterationSlots
from megatron_rl.trainer.loop.mismatch import MismatchBeyond
from megatron_rl.trainer.loop.rank import Rank
from megatron_rl.trainer.loop.saver import RunState
from megatron_rl.trainer.mcore.relay import ReceivingRank, open_relay
from megatron_rl.trainer.mcore.session import Session

# Prompts that were put off and that the run's last lines name.
_MOST_NAMED = 5


MakeBatcher = Callable[[float | None], Batcher]
"""Makes the batcher of an iteration from its baseline: see `GroupAdvantages`."""

Schedule = Callable[[IterationSlots, Session], None]
"""Waits until training on the slots of an iteration may start."""


def start_at_once(slots: IterationSlots, session: Session) -> None:
    """Do not wait: training waits for each micro-batch when it is next, while engines generate others."""


def wait_for_all(slots: IterationSlots, session: Session) -> None:
    """Wait until all groups have arrived, so that nothing overlaps: a schedule to compare with."""
    slots.wait_for_all()
    session.barrier()


SCHEDULES: dict[str, Schedule] = {"periodic": start_at_once, "sync": wait_for_all}
"""The schedules, by the names of --schedule."""


@dataclasses.dataclass(frozen=True)
class SubmissionTerms:
    """The part of a submission that is the same in every iteration."""

    division: Division
    sampling: Sampling
    deadline_seconds: float
    """Seconds until a group that has not arrived fails the iteration."""
    has_baseline: bool = False
    """Whether the mean reward of an iteration is the next one's baseline."""
    plug_ins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The hash of each plug-in's file, recorded with each iteration."""
    objective: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The flags of the objective, recorded when they change."""


class Rollouts:
    """Submits iterations and opens their slots, on one rank."""

    def __init__(
        self,
        client: RolloutClient,
        session: Session,
        terms: SubmissionTerms,
        make_batcher: MakeBatcher,
        schedule: Schedule,
        prompts: PromptSource | None,
        timeline: Timeline | None = None,
        state: RunState | None = None,
    ):
        """`prompts` is rank 0's; the others need none. `state` is that of the iteration before."""
        self._client = client
        self._session = session
        self._terms = terms
        self._make_batcher = make_batcher
        self._copier = DeviceCopier(session.platform)
        self._schedule = schedule
        self._prompts = prompts
        self._timeline = timeline or Timeline()
        self.state = state or RunState()
        """The values that the last iteration left to the next one."""
        self._census: Census | None = None
        self._times: dict[str, float] = {}

    @contextlib.contextmanager
    def iteration(self, identity: Identity) -> Iterator[IterationSlots]:
        """Submit an iteration and yield the slots of this rank's replica; `complete` ends the iteration."""
        # Every rank learns of a failure. And no rank asks for a slot, which has a deadline, while rank 0 evaluates.
        with self._timeline.part("submit"):
            self._session.run_or_raise_everywhere(lambda: self._submit(identity))
        slots = self._open_slots(identity)
        try:
            self._schedule(slots, self._session)
            yield slots
            # The next iteration's slots come over the same group.
            slots.finish()
        except MismatchBeyond as error:
            refused = error.mismatch
            # Every rank raises this, and the first rank that ends ends all: the sidecar must record it before.
            self._session.run_or_raise_everywhere(
                lambda: self._client.refuse(identity.version, refused) if self._session.rank == 0 else None
            )
            raise
        finally:
            slots.close()

    def let_engines_sleep(self, version: int) -> None:
        """Return once engines have given their devices to the ranks; one that is starting starts up before."""
        self._session.run_on_first(lambda: self._client.sleep(version, self._terms.deadline_seconds))

    def complete(self, version: int, mismatch: Mismatch, seconds: float) -> None:
        """Tell the sidecar that an iteration was trained on, the mismatch of its tokens, and the seconds that it took.

        Waits for groups do not count.
        """
        audit_head, baseline = "", None
        if self._session.rank == 0:
            assert self._prompts is not None
            overlapping = 0.0 if self._schedule is wait_for_all else seconds
            ended = self._client.complete(version, mismatch, self._terms.plug_ins, overlapping, self._terms.objective)
            self._times = {} if ended.num_in_flight is None else {MAX_IN_FLIGHT: ended.num_in_flight}
            if ended.environments is not None:
                self._times |= {ENVIRONMENT_MEAN: ended.environments.mean, ENVIRONMENT_P95: ended.environments.p95}
            self._times |= _describe_drafts(ended.drafts)
            census = self._census = ended.census
            num_carried = self._terms.division.plan.count_carried(len(self._prompts.put_off))
            self._prompts.advance(census.num_considered, num_carried, census.put_off, census.rewards)
            audit_head, baseline = ended.head, census.reward
        self.state = RunState(audit_head, self._session.broadcast(baseline) if self._terms.has_baseline else None)

    def describe_engines(self) -> dict[str, Any]:
        """Return the most responses that each engine was given at once, environments' seconds for an answer, drafts.

        On other ranks than 0 there are none.
        """
        return {TIME: dict(self._times)} if self._times else {}

    def describe_prompts(self) -> dict[str, Any]:
        """Return metrics of the last iteration's prompts; none if every prompt is used, or on other ranks than 0."""
        census = self._census
        described: dict[str, Any] = {}
        if census is not None and self._terms.division.plan.num_spare:
            described = {
                "considered": census.num_considered,
                "without_signal": census.num_without_signal,
                "reward_mean": census.reward,
            }
        if self._prompts is not None and self._prompts.num_resting is not None:
            described["resting"] = self._prompts.num_resting
        if self._prompts is not None and (self._terms.division.plan.tail == "carry" or self._prompts.put_off):
            described["put_off"] = len(self._prompts.put_off)
        return {"prompts": described} if described else {}

    def list_put_off(self, checkpoint: Path | None) -> list[str]:
        """Return a note that counts the prompts that were put off and never trained on, and names the first ones.

        Return nothing if there are none, and on other ranks than 0. `checkpoint` is the last one, which holds them.
        """
        if self._prompts is None or not (put_off := self._prompts.put_off):
            return []
        plan = self._terms.division.plan
        remedy = "no checkpoint holds them: with --save a later run could train on them"
        if checkpoint is not None:
            remedy = (
                f"{checkpoint} holds them: a run that resumes from it, with a larger --train-iters if none is left, "
                f"trains on them once {plan.num_prompts} are put off, or at once with --rollout-tail stop"
            )
        named, num_more = put_off[:_MOST_NAMED], max(0, len(put_off) - _MOST_NAMED)
        more = f" and {num_more} more, which `megatron-rl audit` lists" if num_more else ""
        return [
            f"note: {len(put_off)} prompts that --rollout-tail carry put off were not trained on, nor were their "
            f"{len(put_off) * plan.group_size} responses: {', '.join(named)}{more}. {remedy[0].upper()}{remedy[1:]}"
        ]

    def _open_slots(self, identity: Identity) -> IterationSlots:
        replica, terms = self._session.replica, self._terms
        relay = open_relay(self._session.replica_group, self._session.rank)

        def fetch(index: int) -> Slot:
            ask = functools.partial(self._client.encoded_slot, identity.version, replica, index, terms.deadline_seconds)
            return decode(relay.fetch(ask), Slot)

        return IterationSlots(
            fetch,
            self._make_batcher(self.state.baseline),
            terms.division,
            identity,
            self._copier,
            lambda slot: self._timeline.span("wait", slot),
            num_ahead=terms.division.slots_per_replica if isinstance(relay, ReceivingRank) else 1,
            leave=relay.leave,
            max_turns=terms.sampling.max_turns,
        )

    def _submit(self, identity: Identity) -> None:
        if self._session.rank != 0:
            return
        assert self._prompts is not None
        plan = self._terms.division.plan
        num_carried = plan.count_carried(len(self._prompts.put_off))
        self._client.submit(
            Submission(
                run=identity.run,
                version=identity.version,
                fingerprint=identity.fingerprint,
                plan=plan,
                sampling=self._terms.sampling,
                prompts=self._prompts.peek(plan.count_submitted(num_carried), num_carried),
                deadline_seconds=self._terms.deadline_seconds,
                num_carried=num_carried,
            )
        )


def _describe_drafts(drafts: Drafts | None) -> dict[str, float]:
    """Describe the drafts of an iteration by metrics; none if engines drafted nothing."""
    if drafts is None or drafts.count <= 0:
        return {}
    length = 1 + drafts.accepted / drafts.count
    return {DRAFTED: drafts.drafted, ACCEPTED: drafts.accepted, ACCEPTED_LENGTH: length}


def build_rollouts(
    rank: Rank,
    client: RolloutClient,
    prompts: PromptSource | None,
    advantages: GroupAdvantages,
    schedule: Schedule,
    timeline: Timeline,
    state: RunState,
    weights: dict[str, str],
) -> Rollouts:
    """Build the rollouts of a rank; `state` is the last iteration's.

    The audit log has `weights`, the fingerprints of frozen models, beside the objective.
    """
    settings, session = rank.settings, rank.session
    terms = SubmissionTerms(
        settings.sizes.division,
        build_sampling(settings, settings.sampling.temperature, prompts),
        settings.service.deadline_minutes * 60,
        advantages.has_baseline,
        describe_own_files(settings),
        describe_objective(settings) | weights,
    )
    make_batcher = functools.partial(build_batcher, settings, session.device, advantages)
    return Rollouts(client, session, terms, make_batcher, schedule, prompts, timeline, state)


def build_sampling(settings: RunSettings, temperature: float, prompts: PromptSource | None) -> Sampling:
    """Build the sampling that the flags give; only rank 0 has prompts, and only its sampling is used."""
    sampling = settings.sampling
    stops = [] if prompts is None or sampling.ignore_eos else prompts.stops
    return Sampling(
        max_tokens=settings.sizes.longest_response,
        temperature=temperature,
        stop_token_ids=list(dict.fromkeys([*(sampling.stop_token_ids or []), *stops])),
        ignore_eos=sampling.ignore_eos,
        max_turns=settings.environment.max_turns if settings.environment.has_turns else 0,
    )


def build_batcher(
    settings: Settings,
    device: torch.device,
    advantages: GroupAdvantages | None = None,
    baseline: float | None = None,
) -> Batcher:
    """Build the batcher that makes packs as the settings say; `baseline` is as in `GroupAdvantages`."""
    advantages = advantages or GroupAdvantages(settings.algorithm)
    return Batcher(
        functools.partial(advantages, baseline=baseline),
        turn_advantage=advantages.compute_turns if settings.algorithm.turn_credit else None,
        places_rewards=advantages.takes_critic,
        multiple_of=find_pack_multiple(settings),
        vocab_size=settings.architecture.vocab_size,
        is_shared=settings.attention.is_shared,
        prepare=build_preparation(settings, device),
        num_parts=settings.transformer.context_parallel_size,
        replayed=settings.architecture if settings.rollout.replay_routing else None,
        choose=(lambda part: f"{TEACHER.name}.{part.teacher}")
        if any("." in name for name in (*settings.frozen, *settings.served))
        else None,
        served=settings.served,
    )
