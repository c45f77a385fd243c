"""The parts of a run, each made after the parts that it needs."""

from megatron_rl.sidecar.child import OwnSidecar
from megatron_rl.trainer.loop.grpo import build_grpo
from megatron_rl.trainer.loop.inputs import Inputs
from megatron_rl.trainer.loop.rank import Rank
from megatron_rl.trainer.loop.rollouts import Schedule
from megatron_rl.trainer.loop.saver import Saver
from megatron_rl.trainer.loop.stop import Course, StopRequest, build_exit_limits
from megatron_rl.trainer.loop.supervised.stage import build_supervised
from megatron_rl.trainer.loop.trainer import Stage, Trainer
from megatron_rl.trainer.mcore.step.policy import Reference, build_policy, build_reference


def build_trainer(
    rank: Rank, inputs: Inputs, sidecar: OwnSidecar | None, stop: StopRequest, schedule: Schedule
) -> Trainer:
    """Build the loop. Only rank 0 has inputs and, if it started one, a sidecar, which starts up meanwhile."""
    settings, session = rank.settings, rank.session
    policy = build_policy(settings, session, settings.num_updates, rank.recipe)
    reference = _build_reference(rank)
    saver = Saver(settings, session, policy, settings.name, inputs.data, reference, rank.recipe)
    start = saver.load(rank.say)
    rank.startup.say("model: built, its weights are loaded")
    rank.startup.end_part("model and weights")
    stage: Stage
    if settings.run.stage == "sft":
        stage = build_supervised(rank, inputs.demonstrations, policy, start)
    else:
        stage = build_grpo(rank, inputs.prompts, sidecar, policy, reference, start, schedule)
    assert settings.training.train_iters is not None
    limits = build_exit_limits(settings, lambda: rank.startup.seconds)
    return Trainer(session, stage, saver, Course(start.version, settings.training.train_iters, stop, limits))


def _build_reference(rank: Rank) -> Reference | None:
    """Build the reference; None if no divergence from it is part of the loss."""
    settings = rank.settings
    if settings.run.stage == "sft" or settings.algorithm.kl_beta == 0:
        return None
    folder = settings.algorithm.ref_model or settings.model.hf_model
    assert folder is not None
    return build_reference(settings, rank.session, folder, rank.recipe)
