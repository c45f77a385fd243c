"""The parts of a run, each made after the parts that it needs."""

from megatron_rl.algorithm.plug_ins import check_agreement
from megatron_rl.command_line.describe import describe_own_files
from megatron_rl.sidecar.child import OwnSidecar
from megatron_rl.trainer.loop.grpo import build_grpo
from megatron_rl.trainer.loop.inputs import Inputs
from megatron_rl.trainer.loop.rank import Rank
from megatron_rl.trainer.loop.rollouts import Schedule
from megatron_rl.trainer.loop.saver import Saver
from megatron_rl.trainer.loop.stop import Course, StopRequest, build_exit_limits
from megatron_rl.trainer.loop.supervised.stage import build_supervised
from megatron_rl.trainer.loop.trainer import Stage, Trainer
from megatron_rl.trainer.mcore.bridge import check_bridge
from megatron_rl.trainer.mcore.step.policy import BaseAsReference, Policy, Reference, build_policy, build_reference


def build_trainer(
    rank: Rank, inputs: Inputs, sidecar: OwnSidecar | None, stop: StopRequest, schedule: Schedule
) -> Trainer:
    """Build the loop. Only rank 0 has inputs and, if it started one, a sidecar, which starts up meanwhile."""
    settings, session = rank.settings, rank.session
    check_agreement(session.gather(describe_own_files(settings)))
    policy = build_policy(settings, session, settings.num_updates, rank.recipe)
    _check_guest(rank, policy)
    reference = _build_reference(rank, policy)
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


def _check_guest(rank: Rank, policy: Policy) -> None:
    """Compare the policy, which has the weights of --hf-model, with transformers' if its family is user-defined."""
    settings = rank.settings
    if settings.model.weights_bridge is None:
        return
    rank.startup.say(f"model: built; {settings.model.weights_bridge} is compared with transformers")
    assert settings.model.hf_model is not None
    chunks, multiple_of = policy.chunks, settings.sizes.multiple_of
    rank.startup.say(check_bridge(chunks, policy.weights, rank.session, settings.model.hf_model, multiple_of))
    rank.startup.end_part("comparison with transformers")


def _build_reference(rank: Rank, policy: Policy) -> Reference | None:
    """Build the reference; None if no divergence from it is part of the loss."""
    settings = rank.settings
    if settings.run.stage == "sft" or settings.algorithm.kl_beta == 0:
        return None
    if policy.base is not None:
        return BaseAsReference(policy, rank.session, settings.publish.dtype)
    folder = settings.algorithm.ref_model or settings.model.hf_model
    assert folder is not None
    return build_reference(settings, rank.session, folder, rank.recipe)
