"""An iteration of --stage grpo: publish, submit, learn from the first groups while engines sample the others."""

import dataclasses
import datetime
import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.objective import Objective
from megatron_rl.command_line.run import RunSettings, find_shared_folder
from megatron_rl.rewards.spec import find_weights
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.wire import Evaluation, PublishAnswer
from megatron_rl.sidecar.child import Address, OwnSidecar, read_given_address
from megatron_rl.trainer.data.prompts import PromptSource
from megatron_rl.trainer.data.slots import Identity
from megatron_rl.trainer.loop.learner import Learner
from megatron_rl.trainer.loop.measures import Evaluator, Learned, Measures, compute_metrics, summarize
from megatron_rl.trainer.loop.mismatch import MismatchBounds, build_mismatch_bounds
from megatron_rl.trainer.loop.rank import Rank
from megatron_rl.trainer.loop.reporter import Reporter, RunLog, open_log
from megatron_rl.trainer.loop.rollouts import Rollouts, Schedule, build_rollouts, build_sampling
from megatron_rl.trainer.loop.saver import RunState, StartPoint, name_weights
from megatron_rl.trainer.loop.trainer import Stage
from megatron_rl.trainer.mcore.publish.probe import Probe
from megatron_rl.trainer.mcore.publish.publisher import Publisher, build_transport
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.policy import FrozenModel, Policy, Trainable
from megatron_rl.trainer.mcore.step.roles import Roles, build_roles

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.device_turns import DeviceTurns

_DEVICE_TURNS = "megatron_rl.trainer.mcore.device_turns"
# Seconds that a sidecar takes before and after its engines start: it tries rewards and reads the tokenizer.
_SIDECAR_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class GrpoStage(Stage):
    """Learns from groups that engines sample."""

    run: str
    """The run's name."""
    policy: Policy
    others: Mapping[str, FrozenModel]
    """The models of the loss's other roles, by their names."""
    publisher: Publisher
    rollouts: Rollouts
    learner: Learner
    bounds: MismatchBounds
    largest_micro_batch: int
    """The number of tokens that a micro-batch may have."""
    turns: "DeviceTurns | None"
    """The turns of ranks and engines on the same devices; None if each has its devices all the time."""
    log: RunLog
    evaluator: Evaluator
    rates: ClassVar[Mapping[str, str]] = {"generated": "tokens.response", "trained": "tokens.computed"}

    @property
    def state(self) -> RunState:
        return self.rollouts.state

    def publish(self, version: int) -> Identity:
        with self.log.phase("publish"):
            self.policy.synchronize()
            return Identity(self.run, version, self.publisher.publish(version))

    def learn(self, identity: Identity) -> Learned:
        with self.log.phase("train"):
            with self.rollouts.iteration(identity) as slots:
                if self.turns is not None:
                    self._take_devices(self.turns, identity.version)
                equal = self._find_equal(identity)
                bound = self.bounds.error(self.publisher.answer.kind)
                learned = self.learner.learn(slots, equal, bound)
            with self.log.timeline.part("complete"):
                self.rollouts.complete(identity.version, learned.mismatch, self.log.timeline.read("train"))
        return learned

    def describe(self, learned: Learned, measures: Measures) -> dict[str, Any]:
        metrics = compute_metrics(measures, learned.updates, self.largest_micro_batch)
        metrics |= _describe_publish(self.publisher.answer)
        if learned.mismatch.without_replay is not msgspec.UNSET:
            metrics["mismatch"]["without_replay"] = learned.mismatch.without_replay
        metrics |= {name: other.fingerprint for name, other in self.others.items()}
        metrics |= self.rollouts.describe_prompts() | self.rollouts.describe_engines()
        return metrics | {"audit_head": self.state.audit_head}

    def list_remarks(self, checkpoint: Path | None) -> Sequence[str]:
        return self.rollouts.list_put_off(checkpoint)

    def close(self) -> None:
        self.publisher.close()

    def _take_devices(self, turns: "DeviceTurns", version: int) -> None:
        """Have engines sleep, and the ranks come back to their devices. All slots have come."""
        with self.log.timeline.part("devices"):
            self.rollouts.let_engines_sleep(version)
            turns.come_back()

    def _find_equal(self, identity: Identity) -> set[str]:
        """Move the models that are due; return the roles whose weights equal the published policy's."""
        policy, version, fingerprint = self.policy, identity.version, identity.fingerprint
        equal = set()
        for name, other in self.others.items():
            with self.log.timeline.part(name):
                other.move_if_due(policy.wrapped, version, fingerprint)
                if other.is_policy(policy.weights, version, fingerprint):
                    equal.add(name)
        return equal


def _describe_publish(answer: PublishAnswer) -> dict[str, Any]:
    """Return how an engine got its weights, and how many were compared bit for bit; nothing without a model."""
    if not answer.num_parameters:
        return {}
    return {
        "publish": {
            "compared": answer.num_compared,
            "parameters": answer.num_parameters,
            "through": answer.through,
            "quantized": answer.kind.is_quantized,
        }
    }


def build_grpo(
    rank: Rank,
    prompts: PromptSource | None,
    sidecar: OwnSidecar | None,
    policy: Policy,
    others: Mapping[str, FrozenModel],
    critic: Trainable | None,
    start: StartPoint,
    schedule: Schedule,
) -> GrpoStage:
    """Build the stage. Only rank 0 has prompts and, if it started one, a sidecar, which starts up meanwhile."""
    settings = rank.settings
    advantages = GroupAdvantages(settings.algorithm, find_weights(settings.reward))
    client = connect(rank, sidecar)
    rank.startup.end_part("waiting for engines")
    log = open_log(rank, start.version, client, advantages)
    num_updates = settings.sizes.plan.num_updates
    roles = build_roles(settings, rank.session, policy, others, num_updates, log.trace.steps, critic)
    turns = None
    if settings.rollout.takes_turns:
        frozen = [chunk for other in others.values() for chunk in other.chunks]
        trained = [policy] if critic is None else [policy, critic]
        turns = importlib.import_module(_DEVICE_TURNS).DeviceTurns(rank.session, trained, [*frozen, *roles.kept])
    publisher = build_publisher(rank, policy, client, turns)
    rank.stack.callback(publisher.close)
    weights = name_weights(others, critic, settings.served)
    return GrpoStage(
        run=settings.name,
        policy=policy,
        others=others,
        publisher=publisher,
        rollouts=build_rollouts(rank, client, prompts, advantages, schedule, log.timeline, start.state, weights),
        learner=_build_learner(rank, policy, roles, critic, log),
        bounds=build_mismatch_bounds(settings, policy.weights.dtype),
        largest_micro_batch=settings.sizes.largest_micro_batch,
        turns=turns,
        log=log,
        evaluator=_build_evaluator(rank, client, prompts, log.reporter),
    )


def wait_for_engines(settings: RunSettings, session: Session, sidecar: OwnSidecar | None) -> Address:
    """Return the sidecar's address once its engines have started; only rank 0 has a sidecar, if it started one."""

    def find() -> Address:
        if sidecar is None:
            return read_given_address(settings)
        # If an engine does not start in time, the sidecar reports it, with the engine's last words.
        return sidecar.address(settings.rollout.start_minutes * 60 + _SIDECAR_SECONDS)

    return session.run_on_first(find)


def connect(rank: Rank, sidecar: OwnSidecar | None) -> RolloutClient:
    """Wait for the sidecar and take it for this run."""
    settings, session = rank.settings, rank.session
    address = wait_for_engines(settings, session, sidecar)
    client = rank.stack.enter_context(address.client(settings.service.patience_seconds))
    client.use_lease(session.run_on_first(lambda: client.take_lease(settings.name)))
    return client


def build_publisher(rank: Rank, policy: Policy, client: RolloutClient, turns: "DeviceTurns | None") -> Publisher:
    settings, session = rank.settings, rank.session
    receiver = client if session.rank == 0 else None
    publish, sizes = settings.publish, settings.sizes
    weights = policy.weights
    if policy.base is not None and publish.lora == "adapter":
        weights = policy.base.weights.without_base(policy.base.adapters, publish.dtype)
    probe = Probe(
        policy.chunks,
        session,
        settings.name,
        sizes.longest_prompt + sizes.longest_response,
        sizes.multiple_of,
        publish.probe_bound,
        publish.agreement_bound,
        publish.is_base_proved,
    )
    transport = build_transport(settings, settings.name, find_shared_folder(settings), weights, session, receiver)
    deadline = datetime.timedelta(minutes=publish.deadline_minutes)
    leave = None if turns is None else turns.leave
    return Publisher(
        weights, session, receiver, settings.name, transport, publish.dtype, deadline, probe, publish.proof, leave
    )


def _build_learner(rank: Rank, policy: Policy, roles: Roles, critic: Trainable | None, log: RunLog) -> Learner:
    settings, steps = rank.settings, log.trace.steps
    objective = Objective(settings.algorithm, settings.sizes.longest_response)
    observe = settings.observe
    num_kept = math.ceil(observe.log_samples / settings.training.micro_batch_size) if observe.log_sample_tokens else 0
    return Learner(policy, roles, objective, rank.session, log.timeline, steps, num_kept, critic)


def _build_evaluator(rank: Rank, client: RolloutClient, prompts: PromptSource | None, reporter: Reporter) -> Evaluator:
    """Build rank 0's evaluator, for which engines respond; the others wait until rank 0 submits the iteration."""
    settings, config = rank.settings, rank.settings.evaluation
    if prompts is None or not settings.is_evaluated:
        return Evaluator()
    held_out = prompts.held_out(config.num_prompts)
    sampling = build_sampling(settings, config.temperature, prompts)

    def evaluate(identity: Identity) -> dict[str, Any]:
        evaluated = client.evaluate(
            Evaluation(
                run=identity.run,
                version=identity.version,
                fingerprint=identity.fingerprint,
                prompts=held_out,
                group_size=config.num_samples,
                sampling=sampling,
                deadline_seconds=settings.service.deadline_minutes * 60,
            )
        )
        reporter.evaluation(identity.version, evaluated.groups)
        if isinstance(evaluated.figures, str):
            reporter.say(f"warning: version {identity.version} has no figures of --eval-command: {evaluated.figures}")
        return summarize(evaluated, config.pass_reward)

    return Evaluator(config.interval, evaluate)
