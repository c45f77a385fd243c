"""Run updates of GRPO over given groups, as a run makes them, on the ranks of a test; and plant faults in them."""

import contextlib
import dataclasses
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.declaration import RoleLogProbs
from megatron_rl.algorithm.library.grpo import subtract_mean
from megatron_rl.algorithm.objective import Objective, Statistics, combine_statistics
from megatron_rl.command_line.run import Sizes, compute_sizes
from megatron_rl.config.settings import Settings
from megatron_rl.observe.trace import Recorder
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.provenance import tag_version
from megatron_rl.shared.protocol.slots import Division
from megatron_rl.shared.protocol.turns import ENVIRONMENT, ResponsePart
from megatron_rl.trainer.data import batch as batch_module
from megatron_rl.trainer.data.batch import Batch
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.slots import Identity, IterationSlots
from megatron_rl.trainer.loop import learner
from megatron_rl.trainer.loop.measures import Learned, Measures, UpdateOutcome, compute_metrics
from megatron_rl.trainer.loop.rollouts import build_batcher
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.critic import build_critic
from megatron_rl.trainer.mcore.step.forward_step import is_reporter
from megatron_rl.trainer.mcore.step.policy import (
    Policy,
    Trainable,
    build_frozen,
    build_policy,
    build_reference,
)
from megatron_rl.trainer.mcore.step.roles import Roles, build_roles
from megatron_rl.trainer.mcore.step.trace import StepTrace
from tests.distributed.layouts import Model, gather_reduced_shards
from tests.distributed.training import LAYOUTS, settings_of
from tests.grpo_problem import Problem, Trial
from tests.grpo_twin import CRITIC, WEIGHTS, Group, Tensors


@dataclasses.dataclass(frozen=True)
class Seen:
    """The data and results of one update, over all ranks; gradients and weights on rank 0 only."""

    gradients: Tensors
    """The gradients as the optimizer takes them, before they are clipped."""
    weights: Tensors
    """The weights that these are the gradients at."""
    sums: dict[str, float]
    outcome: UpdateOutcome
    metrics: dict[str, Any]
    """The metrics of the update's iteration."""


class Head(Model):
    """A critic that is a head on the policy: it has no tensors of a folder."""

    def gradients(self) -> Tensors:
        return {}

    parameters = gradients


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run on one rank, but its sidecar: slots come from a problem."""

    session: Session
    settings: Settings
    sizes: Sizes
    policy: Policy
    roles: Roles
    critic: Trainable | None = None

    @property
    def model(self) -> Model:
        return self.find_model(self.policy)

    def find_model(self, trained: Trainable) -> Model:
        if not isinstance(trained, Policy):
            return Head(
                self.session, self.policy.weights.architecture, trained.chunks, self.policy.weights, trained.wrapped
            )
        return Model(self.session, trained.weights.architecture, trained.chunks, trained.weights, trained.wrapped)

    @property
    def objective(self) -> Objective:
        return Objective(self.settings.algorithm, self.sizes.longest_response)

    def open_slots(
        self, problem: Problem, identity: Identity, batcher: Any = None, is_shuffled: bool = False, max_turns: int = 0
    ) -> IterationSlots:
        source = Source(problem, self.sizes.division, self.session.replica, identity, is_shuffled)
        batcher = batcher or build_batcher(self.settings, self.session.device)
        copier = DeviceCopier(self.session.platform)
        return IterationSlots(source.slot, batcher, self.sizes.division, identity, copier, max_turns=max_turns)

    def learn(self, learner: learner.Learner, problem: Problem, version: int, equal: Collection[str] = ()) -> Learned:
        """Run an iteration of this version."""
        self.policy.synchronize()
        slots = self.open_slots(problem, Identity("run", version, self.policy.weights.fingerprint()))
        learned = learner.learn(slots, equal)
        slots.close()
        return learned


def build_run(
    session: Session, settings: Settings, reference: Path | None, num_iterations: int = 1, trace: Any = None
) -> Run:
    """Build the parts for some iterations, with the reference of a folder."""
    sizes = compute_sizes(settings, session.num_replicas)
    num_updates = sizes.plan.num_updates
    policy = build_policy(settings, session, num_iterations * num_updates)
    others = {} if reference is None else {"reference": build_reference(settings, session, reference)}
    others |= {name: build_frozen(settings, session, name) for name in settings.frozen}
    critic = None if settings.critic is None else build_critic(settings.critic, session, num_iterations * num_updates)
    roles = build_roles(settings, session, policy, others, num_updates, trace, critic)
    return Run(session, settings, sizes, policy, roles, critic)


@dataclasses.dataclass
class Parts:
    """The parts that a fault may be planted in."""

    roles: Any
    batcher: Any
    objective: Any
    stack: contextlib.ExitStack


class Witness:
    """A recorder of what the learner's parts are given."""

    def __init__(
        self,
        objective: Objective,
        policy: Policy,
        model: Model,
        critic: Trainable | None = None,
        of_critic: Model | None = None,
    ):
        self.gradients: list[Tensors] = []
        self.weights: list[Tensors] = []
        self.statistics: dict[int, list[Statistics]] = {}
        self.log_probs: dict[int, list[RoleLogProbs]] = {}
        self.share = objective.share
        self.config = objective.config
        self.divergences = objective.divergences
        self.takes_entropies = objective.takes_entropies
        self._loss = objective.loss
        self._model = model
        self._step = policy.optimizer.step
        policy.optimizer.step = self._kept_step
        # The critic steps first.
        self._critic: tuple[Tensors, Tensors] = {}, {}
        if critic is not None and of_critic is not None:
            self._step_of_critic, self._of_critic = critic.optimizer.step, of_critic
            critic.optimizer.step = self._kept_step_of_critic

    def loss(self, log_probs: RoleLogProbs, *tensors: Any) -> tuple[torch.Tensor, Statistics]:
        total, statistics = self._loss(log_probs, *tensors)
        self.statistics.setdefault(len(self.gradients), []).append(statistics)
        self.log_probs.setdefault(len(self.gradients), []).append(log_probs)
        return total, statistics

    def _kept_step(self) -> Any:
        for chunk in self._model.wrapped:
            gather_reduced_shards(chunk)
        gradients, weights = self._critic
        self.gradients.append(self._model.gradients() | gradients)
        self.weights.append(self._model.parameters() | weights)
        return self._step()

    def _kept_step_of_critic(self) -> Any:
        model = self._of_critic
        for chunk in model.wrapped:
            gather_reduced_shards(chunk)
        last = model.chunks[-1]
        head = (last.weight if isinstance(model, Head) else last.output_weight()) if last.post_process else None
        scores = None if head is None else (head.main_grad.clone(), head.detach().clone())
        of_scores = next(one for one in model.session.gather(scores) if one is not None)
        self._critic = tuple(
            {f"{CRITIC}{name}": one for name, one in {**named, "score.weight": of_score}.items()}
            for named, of_score in zip((model.gradients(), model.parameters()), of_scores, strict=True)
        )  # type: ignore[assignment]
        return self._step_of_critic()

    def sums(self, update: int, session: Session) -> dict[str, float]:
        """Return the statistics of an update, of the one rank of each replica that speaks for it."""
        mine = combine_statistics(self.statistics[update])[0] if is_reporter() else {}
        totals: dict[str, float] = {}
        for name, value in itertools.chain.from_iterable(sums.items() for sums in session.gather(mine)):
            totals[name] = totals.get(name, 0.0) + value
        return totals


def run_trials(problem: Problem, trials: Sequence[Trial]) -> dict[Trial, list[Seen]]:
    """Run the trials on each rank and return their updates. Trials of one layout follow each other."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for layout, of_layout in itertools.groupby(trials, key=lambda trial: trial.layout):
        with start_session(settings_of(problem.policy, LAYOUTS[layout])) as session:
            for trial in of_layout:
                with contextlib.ExitStack() as stack:
                    results[trial] = _run(problem, trial, session, stack)
    return results


def _run(problem: Problem, trial: Trial, session: Session, stack: contextlib.ExitStack) -> list[Seen]:
    settings = settings_of(problem.policy, f"{LAYOUTS[trial.layout]} {trial.words}")
    group_advantages = GroupAdvantages(settings.algorithm, WEIGHTS)
    recorder = Recorder()
    trace = StepTrace(recorder, session.platform)
    run = build_run(session, settings, problem.reference, trace=trace)
    if run.critic is not None and trial.rules.judging.folder is None:
        for weight in run.critic.chunks[0].parameters():
            weight.data.copy_(trial.rules.judging.draw_score(weight.shape[1]))
    batcher = build_batcher(settings, session.device, group_advantages, trial.rules.baseline)
    parts = Parts(run.roles, batcher, run.objective, stack)
    if trial.fault is not None:
        FAULTS[trial.fault](parts)
    of_critic = None if run.critic is None else run.find_model(run.critic)
    witness = Witness(parts.objective, run.policy, run.model, run.critic, of_critic)
    identity = Identity("run", 3, run.policy.weights.fingerprint())
    divided = problem.divided(trial.num_updates)
    slots = run.open_slots(divided, identity, parts.batcher, trial.is_shuffled, max_turns=8)
    stack.callback(slots.close)
    one = learner.Learner(run.policy, parts.roles, witness, session, trace=trace, critic=run.critic)
    learned = one.learn(slots)
    trace.settle()
    _check_passes(recorder.take(), len(slots), len(run.policy.chunks))
    measures = Measures()
    for of_rank in session.gather(learned.measures):
        measures.merge(of_rank)
    metrics = compute_metrics(measures, learned.updates, run.sizes.largest_micro_batch)
    return [
        Seen(witness.gradients[update], witness.weights[update], witness.sums(update, session), outcome, metrics)
        for update, outcome in enumerate(learned.updates)
    ]


def _check_passes(taken: dict[str, Any], num_slots: int, num_chunks: int) -> None:
    """Check that every micro-batch passed each chunk of the policy and of the reference once, and back, in order."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    now = 0
    for number, begin, length, slot, num_tokens in (row for row in taken["spans"] if len(row) == 5):
        kind = taken["kinds"][number]
        found.setdefault((kind["name"], kind["role"]), []).append((slot, kind["chunk"]))
        # Microseconds are rounded.
        assert begin >= now - 2, "two passes at a time"
        assert length >= 0
        assert num_tokens > 0
        now = begin + length
    everything = sorted(itertools.product(range(num_slots), range(num_chunks)))
    of_teachers = [passed for (_, role), passed in found.items() if role.startswith("teacher.")]
    if of_teachers and max(map(len, of_teachers)) < len(everything):
        assert sorted(itertools.chain.from_iterable(of_teachers)) == everything, "a teacher ran for another's groups"
    for passed in (("forward", "policy"), ("backward", "policy"), ("forward", "reference")):
        assert sorted(found.get(passed, [])) == everything, (passed, found)


class Source:
    """The slots that a sidecar would give one replica."""

    def __init__(self, problem: Problem, division: Division, replica: int, identity: Identity, is_shuffled: bool):
        self._division = division
        self._replica = replica
        self._identity = identity
        groups = [[*enumerate(groups, len(groups) * update)] for update, groups in enumerate(problem.updates)]
        if is_shuffled:
            draw = np.random.default_rng(1)
            groups = [[of_update[place] for place in draw.permutation(len(of_update))] for of_update in groups]
        self._groups = list(itertools.chain.from_iterable(groups))

    def slot(self, index: int) -> wire.Slot:
        division, identity = self._division, self._identity
        unit = division.unit(self._replica, index)
        first = (index - unit.slot) * division.plan.micro_batch_size
        parts = [self._part(*self._groups[place], first) for place in division.bound_numbers(unit)]
        return wire.Slot(
            run=identity.run, version=identity.version, fingerprint=identity.fingerprint, replica=self._replica,
            index=index, parts=parts,
        )  # fmt: skip

    def _part(self, prompt: int, group: Group, first: int) -> wire.GroupPart:
        size = min(self._division.plan.micro_batch_size, self._division.plan.group_size)
        return wire.GroupPart(
            prompt_index=prompt,
            row=f"row-{prompt}",
            prompt_tokens=wire.encode_tokens(group.prompt),
            first_response=first,
            responses=[self._response(group, number) for number in range(first, first + size)],
            rewards=group.rewards,
            components=group.components,
            teacher=f"t{prompt % 2}",
        )

    def _response(self, group: Group, number: int) -> wire.Response:
        tokens = group.responses[number]
        return wire.Response(
            tokens=wire.encode_tokens(tokens),
            log_probs=wire.encode_log_probs(group.engine[number]),
            finish_reason="stop",
            seed=number,
            engine="0",
            spans=[*self._spans(group, number)],
            branches=[wire.Branch(start=start, after=after) for start, after in self._branches(group, number)],
            fingerprint=self._identity.fingerprint,
            reward=group.rewards[number],
        )

    def _spans(self, group: Group, number: int) -> Iterator[wire.VersionSpan]:
        begin, tag = 0, tag_version(self._identity.version)
        sampled, begins = group.list_sampled(number), {start for start, _ in self._branches(group, number)}
        for end in range(1, len(sampled) + 1):
            if end == len(sampled) or end in begins or sampled[end] != sampled[begin]:
                yield wire.VersionSpan(version=tag if sampled[begin] else ENVIRONMENT, start=begin, end=end)
                begin = end

    def _branches(self, group: Group, number: int) -> list[tuple[int, int]]:
        return group.branches[number] if group.branches else []


def _in_log_probs(change: Callable[[RoleLogProbs], RoleLogProbs]) -> Callable[[Parts], None]:
    def plant(parts: Parts) -> None:
        true = parts.objective
        parts.objective = types.SimpleNamespace(
            takes_entropies=true.takes_entropies,
            config=true.config,
            share=true.share,
            divergences=true.divergences,
            loss=lambda log_probs, *tensors: true.loss(change(log_probs), *tensors),
        )

    return plant


def _in_batches(change: Callable[[Batch], Batch]) -> Callable[[Parts], None]:
    def plant(parts: Parts) -> None:
        true = parts.batcher
        parts.batcher = types.SimpleNamespace(batch=lambda slot: change(true.batch(slot)))

    return plant


def _in_pack(name: str, change: Callable[[Batch], torch.Tensor]) -> Callable[[Parts], None]:
    return _in_batches(
        lambda batch: dataclasses.replace(batch, pack=dataclasses.replace(batch.pack, **{name: change(batch)}))
    )


def _advantage(advantage: Callable[[np.ndarray], np.ndarray]) -> Callable[[Parts], None]:
    def plant(parts: Parts) -> None:
        parts.batcher = dataclasses.replace(parts.batcher, advantage=lambda group: advantage(np.asarray(group.rewards)))

    return plant


def _rows_before(batch: Batch) -> torch.Tensor:
    """Predict a response's first token by the row before it in the buffer, as if nothing were shared."""
    rows_N = batch.pack.target_rows_N.clone()
    first = batch.lengths_S.cumsum(0)[:-1]
    # The row of a response's first token is the one that predicts its second, if it has one.
    rows_N[first] = torch.where(batch.lengths_S[1:] > 1, rows_N[(first + 1).clamp(max=len(rows_N) - 1)] - 1, 0)
    return rows_N


def _without_other_denominators(parts: Parts) -> None:
    silent = types.SimpleNamespace(all_reduce=lambda *_, **__: None)
    parts.stack.enter_context(mock.patch.object(learner, "dist", silent))


def _train_on_everything(parts: Parts) -> None:
    everything = lambda response: np.ones(len(response.tokens) // 4, dtype=bool)  # noqa: E731
    parts.stack.enter_context(mock.patch.object(batch_module, "mask_sampled", everything))


def _ignore_branches(parts: Parts) -> None:
    one_chain = lambda response: [ResponsePart(0, len(response.tokens) // 4, 0)]  # noqa: E731
    parts.stack.enter_context(mock.patch.object(batch_module, "list_parts", one_chain))


def _without_temperature(parts: Parts) -> None:
    parts.roles.temperature = 1.0


def _without_correction(parts: Parts) -> None:
    config = dataclasses.replace(parts.objective.config, importance_correction=False, importance_truncation=None)
    parts.objective = dataclasses.replace(parts.objective, config=config)


FAULTS: dict[str, Callable[[Parts], None]] = {
    "old and reference swapped": _in_log_probs(
        lambda r: RoleLogProbs(r.policy_N, r.others["reference"], {"reference": r.old_N})
    ),
    "old is the policy of each update": _in_log_probs(
        lambda r: RoleLogProbs(r.policy_N, r.policy_N.detach(), r.others)
    ),
    "the denominator of another replica left out": _without_other_denominators,
    "a first token predicted by the row before it": _in_pack("target_rows_N", _rows_before),
    "positions are rows": _in_pack("positions_T", lambda batch: torch.arange(batch.pack.num_tokens)),
    "advantages of other responses": _in_batches(
        lambda batch: dataclasses.replace(batch, advantages_S=batch.advantages_S.roll(1))
    ),
    "advantages over a sample's deviation": _advantage(lambda r: subtract_mean(r) / (r.std(ddof=1) + 1e-6)),
    "tokens of environments trained on": _train_on_everything,
    "branches follow what stands before them": _ignore_branches,
    "temperature left out": _without_temperature,
    "correction left out": _without_correction,
}
