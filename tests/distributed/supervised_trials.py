"""Run updates over given demonstrations or pairs, as --stage sft or dpo makes them, on the ranks of a test."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from megatron_rl.command_line.checks import count_interleaved
from megatron_rl.command_line.run import compute_sizes
from megatron_rl.trainer.data.demonstrations import Demonstration, DemonstrationSource
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.loop.measures import Measures
from megatron_rl.trainer.loop.preferences import Comparison
from megatron_rl.trainer.loop.run import build_others
from megatron_rl.trainer.loop.supervised import (
    Imitation,
    SupervisedStage,
    build_packer,
    compute_supervised_metrics,
    divide_held_out,
    evaluate_held_out,
)
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.policy import build_policy
from tests.distributed.layouts import Model, gather_reduced_shards
from tests.distributed.training import settings_of
from tests.supervised_twin import Tensors

NUM_UPDATES = 2
DEMONSTRATIONS_PER_UPDATE, MICRO_BATCH_SIZE = 12, 2
WORDS = (
    f"--train-iters {NUM_UPDATES} --seq-length 96 --global-batch-size {DEMONSTRATIONS_PER_UPDATE} "
    f"--micro-batch-size {MICRO_BATCH_SIZE} --lr 0.002 --lr-decay-style constant --weight-decay 0 --clip-grad 0.5"
)


@dataclasses.dataclass(frozen=True)
class Seen:
    """An update, and the evaluation before it; gradients and weights on rank 0 only."""

    gradients: Tensors
    """The gradients as the optimizer takes them, before clipping."""
    weights: Tensors
    """The weights at which the gradients were computed."""
    metrics: dict
    evaluation: dict


@dataclasses.dataclass(frozen=True)
class Trial:
    """A model, a layout, and the rows to learn."""

    folder: Path
    layout: str
    """The flags of the layout."""
    rows: Sequence[Demonstration]
    held_out: Sequence[Demonstration]
    stage: str = "sft"
    """The stage, and its flags."""

    @property
    def words(self) -> str:
        return f"{self.layout} --stage {self.stage} {WORDS}"


def run_trials(trials: Mapping[str, Trial]) -> dict[str, list[Seen]]:
    """Run each trial on this rank, and return its updates."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, trial in trials.items():
        with start_session(settings_of(trial.folder, trial.words)) as session:
            results[name] = _run(trial, session)
    return results


def _run(trial: Trial, session: Session) -> list[Seen]:
    settings = settings_of(trial.folder, trial.words)
    sizes = compute_sizes(settings, session.num_replicas)
    policy = build_policy(settings, session, NUM_UPDATES)
    model = Model(session, settings.architecture, policy.chunks, policy.weights, policy.wrapped)
    packer = build_packer(settings, DeviceCopier(session.platform))
    source = DemonstrationSource(trial.rows, seed=0, shuffle=False) if session.rank == 0 else None
    of_turn = count_interleaved(settings) if settings.parallel_sizes.virtual_pipeline is not None else 1
    parts = divide_held_out(trial.held_out, MICRO_BATCH_SIZE, session, of_turn)
    task = Imitation()
    if settings.run.stage == "dpo":
        task = Comparison.build(
            settings.preference, sizes.longest_response, policy, build_others(settings, session, policy)
        )
    stage = SupervisedStage("run", policy, session, sizes.division, packer, source, sizes.largest_micro_batch, task)
    kept: list[tuple[Tensors, Tensors]] = []
    step = policy.optimizer.step

    def kept_step() -> object:
        for chunk in model.wrapped:
            gather_reduced_shards(chunk)
        kept.append((model.gradients(), model.parameters()))
        return step()

    policy.optimizer.step = kept_step
    seen = []
    for version in range(NUM_UPDATES):
        identity = stage.publish(version)
        evaluation = evaluate_held_out(policy, session, parts, packer, task)
        learned = stage.learn(identity)
        measures = Measures()
        for of_rank in session.gather(learned.measures):
            measures.merge(of_rank)
        metrics = compute_supervised_metrics(measures, learned.updates[-1], sizes.largest_micro_batch, task)
        seen.append(Seen(*kept[-1], metrics, evaluation))
    return seen
