"""From settings to a run: `train` starts and ends it, `build` lists its parts."""

import contextlib
import datetime
import functools
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algorithm.advantages import GroupAdvantages
from megatron_rl.algorithm.objective import Objective
from megatron_rl.arguments.describe import describe_run
from megatron_rl.arguments.run import RunSettings, find_shared_folder
from megatron_rl.config.cores import find_asked_threads
from megatron_rl.config.settings import Settings
from megatron_rl.data.demonstrations import DemonstrationSource
from megatron_rl.data.prompts import PromptSource, load_prompts
from megatron_rl.errors import ExitCode, InputError, MegatronRLError, UsageError, room_checked
from megatron_rl.mcore.checkpoint import folders
from megatron_rl.mcore.checkpoint.schedule import check_loaded_schedule
from megatron_rl.mcore.publish.probe import Probe
from megatron_rl.mcore.publish.shared_memory import Publisher, SharedMemoryPublisher
from megatron_rl.mcore.publish.stream import StreamPublisher
from megatron_rl.mcore.recipe import STAND_ALONE, Recipe
from megatron_rl.mcore.session import Session, start_session
from megatron_rl.mcore.step.policy import Policy, Reference, build_policy, build_reference
from megatron_rl.mcore.step.roles import build_roles
from megatron_rl.observe import config_file, metrics, samples, warnings_file
from megatron_rl.observe.metrics import read
from megatron_rl.observe.startup import Startup, describe_cores, describe_model, describe_prompts
from megatron_rl.observe.summary import Places, print_summary
from megatron_rl.observe.timeline import Timeline
from megatron_rl.observe.warnings_file import keep_warnings
from megatron_rl.ops.shared_prompt.trial import check_backend
from megatron_rl.protocol.client import RolloutClient
from megatron_rl.protocol.wire import Sampling
from megatron_rl.records.append_file import read_lines
from megatron_rl.records.audit_log import FILE_NAME as AUDIT_FILE
from megatron_rl.rewards.spec import find_weights
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.child import Address, OwnSidecar, read_given_address
from megatron_rl.sidecar.making import build_decoder
from megatron_rl.training.evaluator import Evaluator
from megatron_rl.training.finished import describe_finished
from megatron_rl.training.learner import Learner
from megatron_rl.training.lifelines import listen
from megatron_rl.training.mismatch import build_mismatch_bounds
from megatron_rl.training.reporter import Reporter, reporter_of
from megatron_rl.training.rollouts import SCHEDULES, Rollouts, Schedule, build_batcher
from megatron_rl.training.saver import Saver, check_loaded_stage
from megatron_rl.training.stop import StopRequest, build_exit_limits
from megatron_rl.training.supervised.build import build_supervised, load_source
from megatron_rl.training.supervised.trainer import SupervisedTrainer
from megatron_rl.training.tracing import RankTrace, open_trace
from megatron_rl.training.trainer import Trainer
from megatron_rl.training.watch import Watch, meets_in_an_agent
from megatron_rl.weights.files import Checkpoint
from megatron_rl.weights.mapping import Mapping

# What a sidecar does before and after its engines start: rewards are tried, the tokenizer is read.
_SIDECAR_SECONDS = 60.0


def train(
    settings: RunSettings,
    watch: Watch | None = None,
    schedule: Schedule | None = None,
    startup: Startup | None = None,
    recipe: Recipe = STAND_ALONE,
) -> int:
    """Run one rank from start to end and return the exit code. `schedule` replaces the one that --schedule names.

    An entry that made `watch` and `startup` when its process began passes them: ranks watch each other, and the
    start is timed, from then on.
    """
    watch, startup = watch or Watch.of_environment(), startup or Startup()
    is_first = int(os.environ.get("RANK", "0")) == 0
    stop = StopRequest(settings.loop.grace_seconds).install()
    stop.tidy = watch.tell
    with contextlib.ExitStack() as stack:
        if not settings.observe.verbose:
            path = settings.folder / warnings_file.FILE_NAME
            stack.enter_context(keep_warnings(path, _print_note if is_first else lambda text: None))
        prompts: PromptSource | None = None
        demonstrations: DemonstrationSource | None = None
        sidecar = finished = None
        if is_first:
            if settings.observe.progress != "none":
                startup.show(sys.stdout)
            # Mistakes in data, weights and checkpoints are found before any process is started.
            what = "demonstrations" if settings.run.stage == "sft" else "prompts"
            startup.say(f"{what}: they are read and tokenized")
            data: PromptSource | DemonstrationSource
            if settings.run.stage == "sft":
                data = demonstrations = load_source(settings)
            else:
                data = prompts = _load_prompts(settings)
            startup.say(describe_prompts(data.num_rows, data.num_held_out, data.num_read, what))
            _check_weights(settings)
            check_loaded_stage(settings)
            check_loaded_schedule(settings, settings.num_updates)
            _check_continuation(settings)
            for note in (*settings.notes, *data.notes):
                _print_note(note)
            finished = describe_finished(settings)
            if settings.sidecar is not None and finished is None:
                assert prompts is not None
                sidecar = OwnSidecar(settings.sidecar, prompts.list_kinds())
                startup.say(f"sidecar: started, its log is {sidecar.log}")
                stack.callback(sidecar.close)
        waiting = _find_waiting(settings)
        with watch, room_checked(*_list_written(settings)), contextlib.ExitStack() as parts:
            with contextlib.nullcontext() if sidecar is None else sidecar.reported(watch.fail, startup.say):
                session = start_session(settings, waiting, functools.partial(meet, watch))
                finished = session.broadcast(finished)
                trainer: Trainer | SupervisedTrainer | None = None
                if finished is None:
                    _prepare_device(settings, session, startup)
                    if settings.run.stage == "sft":
                        say = functools.partial(_say, session)
                        trainer = build_supervised(settings, session, demonstrations, stop, parts, startup, say, recipe)
                    else:
                        trainer = build(settings, session, prompts, sidecar, stop, parts, startup, schedule, recipe)
            if trainer is not None:
                _train(settings, trainer, watch, stop, sidecar)
            elif finished is not None and is_first:
                _print_note(finished)
        session.close()
        return ExitCode.OK


def _list_written(settings: RunSettings) -> list[Path]:
    """List the folders that a run writes to."""
    checkpoint = settings.checkpoint
    folders_or_none = [settings.folder, checkpoint.save, checkpoint.save_hf, settings.observe.tensorboard_dir]
    if settings.rollout.transport == "shm" and settings.run.stage == "grpo":
        folders_or_none.append(find_shared_folder(settings))
    return [folder for folder in folders_or_none if folder is not None]


def _prepare_device(settings: RunSettings, session: Session, startup: Startup) -> None:
    """Place this rank on its cores, and try what computes attention; raise on every rank if it fails on any."""
    session.platform.place(find_asked_threads() or settings.cores.threads_of_rank)
    startup.say(describe_model(settings, session.platform.name, session.world_size))
    if settings.platform == "cpu":
        startup.say(describe_cores(settings.cores, torch.get_num_threads()))
    session.run_or_raise_everywhere(lambda: _try_attention(settings, session.device))


def _train(
    settings: RunSettings,
    trainer: Trainer | SupervisedTrainer,
    watch: Watch,
    stop: StopRequest,
    sidecar: OwnSidecar | None,
) -> None:
    """Run the loop, tidied if this process is ended, and print the summary."""
    watch.tidy = trainer.tidy
    watch.describe_interrupt = trainer.saver.describe_loss
    stop.tidy = functools.partial(_leave, trainer, watch)
    watch.follow(lambda: trainer.place, 60.0 * settings.distributed.distributed_timeout_minutes)
    with contextlib.nullcontext() if sidecar is None else _watched(sidecar, watch, trainer):
        trainer.train()
    stop.over()
    _print_summary(settings, trainer)


def build(
    settings: RunSettings,
    session: Session,
    prompts: PromptSource | None,
    sidecar: OwnSidecar | None,
    stop: StopRequest,
    stack: contextlib.ExitStack,
    startup: Startup,
    schedule: Schedule | None = None,
    recipe: Recipe = STAND_ALONE,
) -> Trainer:
    """Build one rank's parts of a run, each after the parts that it needs. `stack` closes what stays open.

    Only rank 0 has prompts and, if it started one, a sidecar, which starts up while the policy is built.
    """
    sizes, num_iterations = settings.sizes, settings.training.train_iters
    assert num_iterations is not None
    policy = build_policy(settings, session, settings.num_updates, recipe)
    reference = _build_reference(settings, session, recipe)
    group_advantages = GroupAdvantages(settings.algorithm, find_weights(settings.reward))
    saver = Saver(settings, session, policy, settings.name, prompts, reference, recipe, group_advantages)
    version = saver.load(functools.partial(_say, session))
    startup.say("model: built, its weights are loaded")
    client = _connect(settings, session, sidecar, stack)
    publisher = _build_publisher(settings, session, policy, client)
    stack.callback(publisher.close)
    trace = None
    if settings.observe.trace == "on":
        trace = open_trace(settings.folder, session, version, client, functools.partial(_say, session))
        stack.callback(trace.close)
    timeline = Timeline(recorder=None if trace is None else trace.recorder)
    reporter = _build_reporter(settings, session, version, recipe, group_advantages)
    if reporter is not None:
        stack.callback(reporter.close)
        reporter.follow(client.status)
        startup.say("all is ready")
        timeline.restart(startup.seconds)
    schedule = schedule or SCHEDULES[settings.loop.schedule]
    return Trainer(
        session=session,
        policy=policy,
        publisher=publisher,
        rollouts=_build_rollouts(settings, session, client, prompts, schedule, timeline, group_advantages),
        learner=_build_learner(settings, session, policy, reference, timeline, group_advantages, trace),
        saver=saver,
        evaluator=_build_evaluator(settings, client, prompts),
        reporter=reporter,
        timeline=timeline,
        stop=stop,
        limits=build_exit_limits(settings, lambda: startup.seconds),
        finish_iteration=recipe.finish_iteration,
        reference=reference,
        largest_micro_batch=sizes.largest_micro_batch,
        mismatch_bounds=build_mismatch_bounds(settings, policy.weights.dtype),
        version=version,
        num_iterations=num_iterations,
        trace=trace,
    )


def _watched(
    sidecar: OwnSidecar, watch: Watch, trainer: Trainer | SupervisedTrainer
) -> contextlib.AbstractContextManager[None]:
    """End all ranks when the sidecar ends, but let a checkpoint be finished that is being saved."""
    return sidecar.watched(watch.fail, is_busy=lambda: trainer.place[1] == "save")


def _find_waiting(settings: Settings) -> datetime.timedelta:
    """Return how long a rank may wait for engines to start, and then for an iteration's last group."""
    if settings.run.stage == "sft":
        return datetime.timedelta()
    return datetime.timedelta(minutes=settings.rollout.start_minutes + settings.service.deadline_minutes)


def _try_attention(settings: Settings, device: torch.device) -> None:
    """On accelerators, whose kernels no test of a CPU has run, raise unless attention is computed."""
    if device.type == "cpu":
        return
    one = settings.architecture
    check_backend(
        settings.attention.backend,
        device,
        settings.transformer.params_dtype,
        one.num_attention_heads,
        one.num_query_groups,
        one.kv_channels,
        one.sliding_window,
    )


def _check_continuation(settings: RunSettings) -> None:
    """Raise an InputError if the folder's metrics end before the checkpoint: another run's, or only its beginning."""
    config, path = settings.checkpoint, settings.folder / metrics.FILE_NAME
    if config.load is None or config.finetune or not path.exists():
        return
    if config.ckpt_step is None and not folders.holds_checkpoint(config.load):
        return
    version, source = folders.find(config.load, config.ckpt_step)
    records = read_lines(path)
    last = records[-1]["version"] if records else math.inf
    if last < version - 1:
        raise InputError(
            f"{settings.folder} holds a run up to version {last}, and {source} goes on from version {version}: "
            "name the --rollout-folder of the run that saved it, or a new one"
        )


def _build_reference(settings: Settings, session: Session, recipe: Recipe) -> Reference | None:
    """Build the reference; None if the divergence from it has weight 0."""
    if settings.algorithm.kl_beta == 0:
        return None
    folder = settings.algorithm.ref_model or settings.model.hf_model
    assert folder is not None
    return build_reference(settings, session, folder, recipe)


def _connect(
    settings: RunSettings, session: Session, sidecar: OwnSidecar | None, stack: contextlib.ExitStack
) -> RolloutClient:
    """Wait for the sidecar and take it for this run."""

    def find() -> Address | None:
        if session.rank != 0:
            return None
        if sidecar is None:
            return read_given_address(settings)
        # An engine that does not start in time is the sidecar's to report, with its last words.
        return sidecar.address(settings.rollout.start_minutes * 60 + _SIDECAR_SECONDS)

    address = session.broadcast(session.run_or_raise_everywhere(find))
    assert address is not None
    client = stack.enter_context(address.client(settings.service.patience_seconds))
    lease = session.run_or_raise_everywhere(lambda: client.take_lease(settings.name) if session.rank == 0 else 0)
    client.use_lease(session.broadcast(lease))
    return client


def _build_publisher(settings: RunSettings, session: Session, policy: Policy, client: RolloutClient) -> Publisher:
    receiver = client if session.rank == 0 else None
    publish, run = settings.publish, settings.name
    transport, dtype = settings.rollout.transport, publish.dtype
    deadline = datetime.timedelta(minutes=publish.deadline_minutes)
    sizes = settings.sizes
    longest = sizes.longest_prompt + sizes.longest_response
    probe = Probe(policy.chunks, session, run, longest, sizes.multiple_of, publish.probe_bound, publish.agreement_bound)
    if transport == "shm":
        folder = find_shared_folder(settings)
        return SharedMemoryPublisher(
            policy.weights, session, receiver, run, folder, dtype, deadline, probe, publish.proof
        )
    if transport not in session.platform.weight_transports:
        raise UsageError(
            f"--rollout-transport {transport} cannot send from {session.platform.name}: write one of "
            f"{', '.join(session.platform.weight_transports)}"
        )
    session.run_or_raise_everywhere(lambda: streams.find_library(transport) if session.rank == 0 else None)
    make = streams.open_sender
    return StreamPublisher(
        policy.weights, session, receiver, run, transport, make, dtype, deadline, probe, publish.proof
    )


def _build_rollouts(
    settings: RunSettings,
    session: Session,
    client: RolloutClient,
    prompts: PromptSource | None,
    schedule: Schedule,
    timeline: Timeline,
    group_advantages: GroupAdvantages,
) -> Rollouts:
    batcher = build_batcher(settings, session.device, group_advantages)
    return Rollouts(
        client,
        session,
        settings.name,
        settings.sizes.division,
        _sampling(settings, settings.sampling.temperature, prompts),
        batcher,
        schedule,
        settings.service.deadline_minutes * 60,
        prompts,
        lambda slot: timeline.span("wait", slot),
        group_advantages,
        lambda: timeline.part("submit"),
    )


def _build_learner(
    settings: RunSettings,
    session: Session,
    policy: Policy,
    reference: Reference | None,
    timeline: Timeline,
    group_advantages: GroupAdvantages,
    trace: RankTrace | None,
) -> Learner:
    steps = None if trace is None else trace.steps
    roles = build_roles(settings, session, policy, reference, settings.sizes.plan.num_updates, steps)
    objective = Objective(settings.algorithm, settings.sizes.longest_response)
    observe = settings.observe
    num_kept = math.ceil(observe.log_samples / settings.training.micro_batch_size) if observe.log_sample_tokens else 0
    return Learner(policy, roles, objective, session, timeline, group_advantages, steps, num_kept)


def _build_evaluator(settings: RunSettings, client: RolloutClient, prompts: PromptSource | None) -> Evaluator | None:
    if prompts is None or settings.evaluation.interval is None:
        return None
    return Evaluator(
        settings.evaluation,
        client,
        settings.name,
        prompts.held_out(settings.evaluation.num_prompts),
        _sampling(settings, settings.evaluation.temperature, prompts),
        settings.service.deadline_minutes * 60,
    )


def _build_reporter(
    settings: RunSettings, session: Session, version: int, recipe: Recipe, group_advantages: GroupAdvantages
) -> Reporter | None:
    if session.rank != 0:
        return None
    assert settings.model.hf_model is not None
    assert settings.training.train_iters is not None
    decode = build_decoder(str(settings.model.hf_model))
    num_groups = settings.sizes.plan.num_prompts
    sinks = None if recipe.open_sinks is None else recipe.open_sinks()
    num_iterations = settings.training.train_iters
    reporter = reporter_of(
        settings, settings.folder, version, num_iterations, num_groups, decode, group_advantages, sinks
    )
    config_file.write(settings.folder / config_file.FILE_NAME, describe_run(settings))
    return reporter


def _sampling(settings: RunSettings, temperature: float, prompts: PromptSource | None) -> Sampling:
    """Return how responses are sampled; rank 0, which has prompts, is the one that asks for them."""
    sampling = settings.sampling
    stops = [] if prompts is None or sampling.ignore_eos else prompts.stops
    return Sampling(
        max_tokens=settings.sizes.longest_response,
        temperature=temperature,
        stop_token_ids=list(dict.fromkeys([*(sampling.stop_token_ids or []), *stops])),
        ignore_eos=sampling.ignore_eos,
    )


def _say(session: Session, text: str) -> None:
    if session.rank == 0:
        _print_note(text)


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _leave(trainer: Trainer | SupervisedTrainer, watch: Watch, reason: MegatronRLError) -> None:
    try:
        trainer.tidy()
    finally:
        watch.tell(reason)


def _print_summary(settings: RunSettings, trainer: Trainer | SupervisedTrainer) -> None:
    """Print the run's results and where its files are."""
    if trainer.reporter is None:
        return
    trainer.reporter.close()
    is_sampled = settings.run.stage == "grpo"
    places = Places(
        checkpoint=trainer.saver.last_saved,
        hf_weights=trainer.saver.last_hf,
        metrics=settings.folder / metrics.FILE_NAME,
        samples=settings.folder / samples.FILE_NAME if is_sampled else None,
        audit_log=settings.folder / AUDIT_FILE if is_sampled else None,
        tensorboard=settings.observe.tensorboard_dir,
    )
    print_summary(read(settings.folder), places, sys.stdout)


def _load_prompts(settings: RunSettings) -> PromptSource:
    assert settings.model.hf_model is not None
    return load_prompts(
        settings.data,
        settings.model.hf_model,
        seed=settings.training.seed,
        longest=settings.sizes.longest_prompt,
        vocab_size=settings.architecture.vocab_size,
    )


def _check_weights(settings: Settings) -> None:
    """Raise an InputError unless the folders hold the architecture's tensors."""
    reference = settings.algorithm.ref_model if settings.algorithm.kl_beta else None
    for folder in (settings.model.hf_model, reference):
        if folder is not None:
            with Checkpoint(folder) as checkpoint:
                checkpoint.check(Mapping(settings.architecture))


def meet(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """Connect to the store and return it; from then on, if not earlier, the ranks watch each other."""
    if watch.is_connected:
        return _store_of_rank_0(watch, timeout)
    store, _, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if world_size > 1 and meets_in_an_agent():
        watch.connect_through(store)
    return store


def _store_of_rank_0(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """Open the store at a port that rank 0 tells the others: at MASTER_PORT they watch each other."""
    host = os.environ["MASTER_ADDR"]
    if watch.rank == 0:
        listener = listen(host, 0)
        port = listener.getsockname()[1]
        watch.say_store(port)
        return dist.TCPStore(
            host, port, watch.world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach()
        )
    port = watch.store_port(timeout.total_seconds())
    if port is None:
        raise TimeoutError("rank 0 did not say where its store is")
    return dist.TCPStore(host, port, watch.world_size, is_master=False, timeout=timeout)
