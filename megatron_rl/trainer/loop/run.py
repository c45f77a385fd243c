"""One rank of a run, from the settings to the exit code; and the parts of a run, each made after what it needs."""

import contextlib
import dataclasses
import datetime
import functools
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algorithm import plug_ins
from megatron_rl.algorithm.roles.reference import REFERENCE
from megatron_rl.algorithm.settings import name_teachers
from megatron_rl.command_line.describe import describe_own_files
from megatron_rl.command_line.run import RunSettings, find_shared_folder
from megatron_rl.config.hardware import find_asked_threads
from megatron_rl.config.settings import AttentionConfig, Settings
from megatron_rl.errors import ExitCode, UsageError, room_checked
from megatron_rl.observe import metrics, run_folder, samples
from megatron_rl.observe.rank_places import RankPlaces
from megatron_rl.observe.run_folder import keep_warnings
from megatron_rl.observe.startup import Startup, describe_cores, describe_model
from megatron_rl.observe.summary import print_summary
from megatron_rl.ops import main_gradients
from megatron_rl.rewards.model_folders import hash_folder
from megatron_rl.shared.device_memory import has_reference, make_look_up
from megatron_rl.shared.garbage import leaving_out_what_exists
from megatron_rl.shared.records.audit_events import FILE_NAME as AUDIT_FILE
from megatron_rl.sidecar.child import OwnSidecar
from megatron_rl.trainer.loop.grpo import build_grpo, wait_for_engines
from megatron_rl.trainer.loop.inputs import Inputs, check_inputs, load_inputs
from megatron_rl.trainer.loop.lifelines import listen
from megatron_rl.trainer.loop.rank import STAND_ALONE, Rank, Recipe, print_note
from megatron_rl.trainer.loop.rollouts import SCHEDULES, Schedule
from megatron_rl.trainer.loop.saver import Saver
from megatron_rl.trainer.loop.stop import Course, StopRequest
from megatron_rl.trainer.loop.trainer import Stage, Trainer
from megatron_rl.trainer.loop.watch import Loop, Watch, meets_in_an_agent
from megatron_rl.trainer.mcore.model.gpt import INVARIANT, build_model
from megatron_rl.trainer.mcore.session import Session, start_session
from megatron_rl.trainer.mcore.step.policy import (
    BaseAsReference,
    BuildModel,
    FrozenModel,
    Policy,
    build_frozen,
    build_policy,
    build_reference,
)
from megatron_rl.trainer.mcore.step.roles import CRITIC_MODULE

# Modules that only some runs import, besides a critic's: of the stages that read responses, of --rollout-colocate and
# of --weights-bridge.
_SUPERVISED = "megatron_rl.trainer.loop.supervised"
_SETTLING = "megatron_rl.trainer.loop.settling"
_RANK_MEMORY = "megatron_rl.trainer.loop.rank_memory"
_BRIDGE = "megatron_rl.trainer.mcore.bridge"


def train(
    settings: RunSettings,
    watch: Watch | None = None,
    schedule: Schedule | None = None,
    startup: Startup | None = None,
    recipe: Recipe | None = None,
) -> int:
    """Run one rank from start to end and return the exit code. `schedule` replaces the one that --schedule names.

    An entry that made `watch` and `startup` when its process began passes them: ranks watch each other, and the
    start is timed, from then on.
    """
    watch, startup = watch or Watch.of_environment(), startup or Startup()
    recipe = recipe or STAND_ALONE
    if (settings.run.stage == "serve") is (recipe.build_loop is None):
        raise UsageError("--stage serve is for `megatron-rl serve --tinker`, which sets it")
    startup.end_part("imports and flags")
    # Nothing overlaps where engines sleep while ranks train.
    schedule = schedule or SCHEDULES["sync" if settings.rollout.takes_turns else settings.loop.schedule]
    is_first = int(os.environ.get("RANK", "0")) == 0
    stop = StopRequest(settings.loop.grace_seconds, watch.leave).install()
    with contextlib.ExitStack() as stack:
        if not settings.observe.verbose:
            path = settings.folder / run_folder.WARNINGS_FILE
            stack.enter_context(keep_warnings(path, print_note if is_first else lambda text: None))
        inputs, sidecar = _prepare(settings, startup, stack, recipe) if is_first else (Inputs(), None)
        trainer: Loop | None = None
        with watch, room_checked(*_list_written(settings)), contextlib.ExitStack() as parts:
            with contextlib.nullcontext() if sidecar is None else sidecar.reported(watch.fail, startup.say):
                # A rank waits for engines to start, and then for an iteration's last group.
                minutes = settings.rollout.start_minutes + settings.service.deadline_minutes
                waiting = datetime.timedelta(minutes=minutes if settings.run.is_sampled else 0)
                session = start_session(settings, waiting, functools.partial(meet, watch))
                startup.end_part("process groups")
                check_agreement(session.gather(settings.training.micro_batch_size))
                check_same_attention(session.gather(settings.attention))
                if not session.broadcast(inputs.is_finished):
                    if settings.rollout.takes_turns:
                        # They need the devices to start, and sleep then.
                        wait_for_engines(settings, session, sidecar)
                        startup.end_part("waiting for engines")
                    settings = _prepare_device(settings, session, startup)
                    rank = Rank(settings, session, recipe, startup, parts)
                    if recipe.build_loop is not None:
                        trainer = recipe.build_loop(rank, sidecar, stop)
                    else:
                        trainer = build_trainer(rank, inputs, sidecar, stop, schedule)
            if trainer is not None:
                _train(settings, trainer, watch, stop, sidecar)
        session.close()
        return ExitCode.OK


def _prepare(
    settings: RunSettings, startup: Startup, stack: contextlib.ExitStack, recipe: Recipe = STAND_ALONE
) -> tuple[Inputs, OwnSidecar | None]:
    """Start the run's own sidecar, if it has one, and load the data; `stack` ends it. Only rank 0 calls this.

    The sidecar starts as soon as all is checked but what needs a tokenizer. It serves once it has rows of the data.
    """
    if settings.observe.progress != "none":
        startup.show(sys.stdout)
    sidecar, of_sidecar = None, settings.sidecar
    is_shared = of_sidecar is not None and of_sidecar.rollout.is_colocated
    if of_sidecar is not None and of_sidecar.rollout.takes_turns:
        # Turns are rehearsed without a device, or without engines that need one.
        is_shared = settings.platform != "cpu" and of_sidecar.rollout.engine == "vllm"
    memory = importlib.import_module(_RANK_MEMORY) if is_shared else None
    with (memory and memory.begin_count(settings)) or contextlib.nullcontext() as count:
        checked = check_inputs(settings)
        startup.end_part("checks")
        if of_sidecar is not None and not checked.is_finished:
            if memory is not None:
                of_sidecar, line = memory.share_device(settings, count)
                startup.say(line)
            sidecar = OwnSidecar(of_sidecar, recipe.sidecar)
            startup.say(f"sidecar: started, its log is {sidecar.log}")
            stack.callback(sidecar.close)
    inputs = load_inputs(settings, checked, startup)
    for note in inputs.notes:
        print_note(note)
    if sidecar is not None and inputs.prompts is not None:
        sidecar.try_rewards(inputs.prompts.list_kinds())
    startup.end_part("data")
    return inputs, sidecar


def _list_written(settings: RunSettings) -> list[Path]:
    """Return the folders that a run writes to."""
    written = [settings.folder, settings.observe.tensorboard_dir, *settings.checkpoint.written.values()]
    if settings.rollout.transport == "shm" and settings.run.is_sampled:
        written.append(find_shared_folder(settings))
    return [folder for folder in written if folder is not None]


def check_agreement(sizes: Sequence[int]) -> None:
    """Raise unless all ranks have micro-batches of the same size, which may follow from each host's devices."""
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the ranks' devices differ in memory, and make --micro-batch-size {min(sizes)} on some hosts and "
            f"{max(sizes)} on others: write --micro-batch-size {min(sizes)}"
        )


def check_same_attention(of_ranks: Sequence[AttentionConfig]) -> None:
    """Raise unless all ranks compute attention in the same way, which may follow from each host's devices."""
    ways = {f"--shared-prompt-backend {one.backend} --shared-prompt-blocks {one.blocks}" for one in of_ranks}
    if len(ways) > 1:
        raise UsageError(f"the ranks' devices differ, and each takes one of {'; '.join(sorted(ways))}: write one")


def _prepare_device(settings: RunSettings, session: Session, startup: Startup) -> RunSettings:
    """Place this rank on its cores, and try its kernels; raise on every rank if that fails on any.

    Return the settings with the backends that passed.
    """
    session.platform.place(find_asked_threads() or settings.cores.threads_of_rank)
    if served := name_teachers(settings.algorithm.teacher, are_served=True):
        hashes = session.run_on_first(lambda: {name: hash_folder(folder) for name, folder in served.items()})
        settings = dataclasses.replace(settings, served=hashes)
    startup.say(describe_model(settings, session.platform.name, session.world_size))
    if settings.platform == "cpu":
        startup.say(describe_cores(settings.cores, torch.get_num_threads()))
    # Tests on a CPU have not run the kernels of an accelerator.
    if session.device.type == "cpu":
        if settings.rollout.is_batch_invariant:
            architecture, dtype = settings.architecture, settings.transformer.params_dtype
            session.run_or_raise_everywhere(
                lambda: importlib.import_module(INVARIANT).try_operations(architecture, dtype)
            )
        return settings
    settle = importlib.import_module(_SETTLING).settle_backends
    frozen = {name: settle(one, session, startup.say) for name, one in settings.frozen.items()}
    critic = None if settings.critic is None else settle(settings.critic, session, startup.say)
    settings = dataclasses.replace(settings, frozen=frozen, critic=critic)
    settings = settle(settings, session, startup.say)
    session.run_or_raise_everywhere(lambda: _try_main_gradients(settings, session.device))
    return settings


def _try_main_gradients(settings: Settings, device: torch.device) -> None:
    """Raise unless the device adds weight gradients to main gradients as the run will."""
    dtype = settings.transformer.params_dtype
    if settings.transformer.gradient_accumulation_fusion:
        main_gradients.check_device(device, dtype, torch.float32 if settings.ddp.grad_reduce_in_fp32 else dtype)


def _train(settings: RunSettings, trainer: Loop, watch: Watch, stop: StopRequest, sidecar: OwnSidecar | None) -> None:
    places = RankPlaces(settings.folder) if watch.rank == 0 else None
    watch.follow(trainer, 60.0 * settings.distributed.distributed_timeout_minutes, places)
    watched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if sidecar is not None:
        # When it ends, all ranks end, but a checkpoint that is being saved is finished first.
        watched = sidecar.watched(watch.fail, is_busy=lambda: trainer.is_saving)
    with watched, leaving_out_what_exists():
        trainer.train()
    stop.over()
    if watch.rank == 0 and isinstance(trainer, Trainer):
        _print_summary(settings, trainer)


def _print_summary(settings: RunSettings, trainer: Trainer) -> None:
    """Print the run's results and where its files are."""
    trainer.log.reporter.close()
    is_sampled = settings.run.stage == "grpo"
    places = {
        "checkpoint": trainer.saver.last_saved,
        "Hugging Face weights": trainer.saver.last_hf,
        "metrics": settings.folder / metrics.FILE_NAME,
        "samples": settings.folder / samples.FILE_NAME if is_sampled else None,
        "audit log": settings.folder / AUDIT_FILE if is_sampled else None,
        "TensorBoard": settings.observe.tensorboard_dir,
    }
    notes = [note for note in settings.notes if note.startswith("--eval-interval")]
    print_summary(metrics.read_metrics(settings.folder), places, sys.stdout, notes)


def meet(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """Connect to the store and return it; if the ranks did not watch each other yet, they do from then on."""
    if watch.is_connected:
        return _store_of_rank_0(watch, timeout)
    store, _, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if world_size > 1 and meets_in_an_agent():
        watch.connect_through(store)
    return store


def _store_of_rank_0(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """Open the store at a port that rank 0 tells the others, since they watch each other at MASTER_PORT."""
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


def build_trainer(
    rank: Rank, inputs: Inputs, sidecar: OwnSidecar | None, stop: StopRequest, schedule: Schedule
) -> Trainer:
    """Build the loop. Only rank 0 has inputs and, if it started one, a sidecar, which starts up meanwhile."""
    settings, session = rank.settings, rank.session
    plug_ins.check_agreement(session.gather(describe_own_files(settings)))
    policy = build_policy(settings, session, settings.num_updates, rank.recipe.build_model)
    _check_guest(rank, policy)
    others = build_others(settings, session, policy, rank.recipe.build_model)
    critic = None
    if settings.critic is not None:
        critic = importlib.import_module(CRITIC_MODULE).build_critic(settings.critic, session, settings.num_updates)
    saver = Saver(settings, session, policy, settings.name, inputs.data, others, rank.recipe.saved, critic)
    start = saver.load(rank.say)
    rank.startup.say("model: built, its weights are loaded")
    rank.startup.end_part("model and weights")
    stage: Stage
    if settings.run.stage != "grpo":
        module = importlib.import_module(_SUPERVISED)
        stage = module.build_supervised(rank, inputs.demonstrations, policy, others, start)
    else:
        stage = build_grpo(rank, inputs.prompts, sidecar, policy, others, critic, start, schedule)
    assert settings.training.train_iters is not None
    course = Course(start.version, settings.training.train_iters, stop, settings.loop, lambda: rank.startup.seconds)
    return Trainer(session, stage, saver, course)


def _check_guest(rank: Rank, policy: Policy) -> None:
    """Compare the policy, which has the weights of --hf-model, with transformers' if its family is user-defined."""
    settings = rank.settings
    if settings.model.weights_bridge is None:
        return
    rank.startup.say(f"model: built; {settings.model.weights_bridge} is compared with transformers")
    assert settings.model.hf_model is not None
    chunks, multiple_of = policy.chunks, settings.sizes.multiple_of
    bridge = importlib.import_module(_BRIDGE)
    rank.startup.say(bridge.check_bridge(chunks, policy.weights, rank.session, settings.model.hf_model, multiple_of))
    rank.startup.end_part("comparison with transformers")


def build_others(
    settings: Settings, session: Session, policy: Policy, build: BuildModel = build_model
) -> dict[str, FrozenModel]:
    """Build the models of the roles that the loss needs, by the names of the roles."""
    others = dict[str, FrozenModel]()
    if has_reference(make_look_up(settings)):
        others[REFERENCE.name] = _build_reference(settings, session, policy, build)
    others |= {name: build_frozen(settings, session, name) for name in settings.frozen}
    return others


def _build_reference(settings: Settings, session: Session, policy: Policy, build: BuildModel) -> FrozenModel:
    if policy.base is not None:
        return BaseAsReference(policy, session, settings.publish.dtype)
    folder = settings.algorithm.ref_model or settings.model.hf_model
    assert folder is not None
    return build_reference(settings, session, folder, build)
