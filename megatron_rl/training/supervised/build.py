"""From settings to the parts of supervised fine-tuning."""

import contextlib
from collections.abc import Callable

from megatron_rl.arguments.checks import count_interleaved
from megatron_rl.arguments.describe import describe_run
from megatron_rl.arguments.run import RunSettings
from megatron_rl.data.demonstrations import DemonstrationSource, load_demonstrations
from megatron_rl.mcore.recipe import Recipe
from megatron_rl.mcore.session import Session
from megatron_rl.mcore.step.policy import Policy, build_policy
from megatron_rl.observe import config_file
from megatron_rl.observe.startup import Startup
from megatron_rl.observe.timeline import Timeline
from megatron_rl.training.reporter import MetricsReporter, metrics_reporter_of
from megatron_rl.training.saver import Saver
from megatron_rl.training.stop import StopRequest, build_exit_limits
from megatron_rl.training.supervised.evaluator import SupervisedEvaluator
from megatron_rl.training.supervised.learner import SupervisedLearner
from megatron_rl.training.supervised.packs import Demonstrations, Packer, build_packer, divide_held_out
from megatron_rl.training.supervised.trainer import SupervisedTrainer


def load_source(settings: RunSettings) -> DemonstrationSource:
    """Read the data of a run."""
    assert settings.model.hf_model is not None
    return load_demonstrations(
        settings.data,
        settings.model.hf_model,
        seed=settings.training.seed,
        longest=settings.sizes.longest_response,
        vocab_size=settings.architecture.vocab_size,
    )


def build_supervised(
    settings: RunSettings,
    session: Session,
    source: DemonstrationSource | None,
    stop: StopRequest,
    stack: contextlib.ExitStack,
    startup: Startup,
    say: Callable[[str], None],
    recipe: Recipe,
) -> SupervisedTrainer:
    """Build one rank's parts of a run. `stack` closes what stays open. Only rank 0 has the source."""
    sizes, num_iterations = settings.sizes, settings.training.train_iters
    assert num_iterations is not None
    policy = build_policy(settings, session, settings.num_updates, recipe)
    saver = Saver(settings, session, policy, settings.name, source, None, recipe)
    version = saver.load(say)
    startup.say("model: built, its weights are loaded")
    timeline = Timeline()
    reporter: MetricsReporter | None = None
    if session.rank == 0:
        sinks = None if recipe.open_sinks is None else recipe.open_sinks()
        reporter = metrics_reporter_of(settings, settings.folder, version, num_iterations, sinks)
        stack.callback(reporter.close)
        config_file.write(settings.folder / config_file.FILE_NAME, describe_run(settings))
        startup.say("all is ready")
        timeline.restart(startup.seconds)
    packer = build_packer(settings, session.device, lambda: timeline.span("pack"))
    return SupervisedTrainer(
        session=session,
        demonstrations=Demonstrations(session, sizes.division, packer, source),
        learner=SupervisedLearner(policy, session, lambda: timeline.span("update")),
        saver=saver,
        evaluator=_build_evaluator(settings, session, policy, packer, source),
        reporter=reporter,
        timeline=timeline,
        stop=stop,
        limits=build_exit_limits(settings, lambda: startup.seconds),
        finish_iteration=recipe.finish_iteration,
        largest_micro_batch=sizes.largest_micro_batch,
        version=version,
        num_iterations=num_iterations,
    )


def _build_evaluator(
    settings: RunSettings, session: Session, policy: Policy, packer: Packer, source: DemonstrationSource | None
) -> SupervisedEvaluator | None:
    interval = settings.evaluation.interval
    if interval is None:
        return None
    held_out = session.broadcast(None if source is None else source.held_out(settings.evaluation.num_prompts))
    assert held_out is not None
    is_interleaved = settings.parallel_sizes.virtual_pipeline is not None
    count_of_turn = count_interleaved(settings) if is_interleaved else 1
    parts = divide_held_out(held_out, settings.training.micro_batch_size, session, count_of_turn)
    return SupervisedEvaluator(policy, session, parts, packer, interval)
