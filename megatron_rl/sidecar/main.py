"""The sidecar's process: starts rewards and engines at the same time, then the service, and ends them in reverse."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request

from megatron_rl.config.hardware import count_cores, share_cores
from megatron_rl.config.settings import RolloutConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.errors import ExitCode, MegatronRLError, room_checked
from megatron_rl.rewards.model_folders import CLASSIFIER, JUDGE
from megatron_rl.rewards.pool import RewardKind, RewardPool, Rewards, build_pool_settings, make_classifier_pool
from megatron_rl.rewards.spec import parse_specs
from megatron_rl.shared.chat import Decode, build_decoder
from megatron_rl.shared.garbage import leaving_out_what_exists
from megatron_rl.shared.records.append_file import make_private_folder, write_private
from megatron_rl.sidecar import load_part, parent, starting
from megatron_rl.sidecar.engines.scripted import ScriptedFactory, read_script
from megatron_rl.sidecar.evaluation import Measure, measure_nothing
from megatron_rl.sidecar.group_maker import NoScorer, PoolScorer, Samplers
from megatron_rl.sidecar.hosts import find_secrets
from megatron_rl.sidecar.http import build_application, renew_lease
from megatron_rl.sidecar.in_flight.control import Pacer
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.members import EngineFactory, cancel
from megatron_rl.sidecar.recorder import RunRecorder, SidecarTrace
from megatron_rl.sidecar.service import RolloutService
from megatron_rl.sidecar.serving import find_url, open_listener, serve, set_at_end
from megatron_rl.sidecar.settings import LAST_WORDS, SidecarSettings, read_settings
from megatron_rl.sidecar.starting import StartNotes
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.engine import Deadlines
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.flags import check_with_vllm, split_flags
from megatron_rl.sidecar.vllm.server import configure_server, find_packages

if TYPE_CHECKING:
    from megatron_rl.sidecar.hosts.membership import OtherHosts
    from megatron_rl.sidecar.teachers import Teachers
    from megatron_rl.sidecar.user_environments import UserRollouts

TOKEN_FILE = "token"
ADDRESS_FILE = "address"
ENGINE_LOGS = "logs"

T = TypeVar("T")
AddRoutes = Callable[[FastAPI, Callable[[Request], None]], None]
"""Adds routes to the sidecar's application; the function that it is given renews the lease of a request."""
OpenMore = Callable[[SidecarSettings, Samplers, Decode, contextlib.AsyncExitStack], Awaitable[AddRoutes]]
"""Opens a part beside the service, with the engines, until the stack ends."""

_log = logging.getLogger("megatron_rl.sidecar")


def main(words: list[str], open_more: OpenMore | None = None) -> int:
    """Run until told to end, and return the exit code. `open_more` opens a further part beside the service."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    # httpx logs every request to an engine, many a second. The audit log has them all.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = read_settings(words)
        with room_checked(settings.folder):
            asyncio.run(run(settings, open_more))
    except MegatronRLError as error:
        print(f"{LAST_WORDS}{error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


async def run(settings: SidecarSettings, open_more: OpenMore | None = None) -> None:
    """Start everything, serve, and end everything."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    set_at_end(ended)
    folder = settings.folder
    make_private_folder(folder)
    async with contextlib.AsyncExitStack() as stack:
        pool, rollouts = build_rewards(settings, stack), _open_rollouts(settings)
        teachers = None
        if settings.teachers:
            teachers = load_part("teachers").open_teachers(settings, _count_threads(settings), stack)
        for part in (pool, rollouts, teachers):
            if part is not None:
                stack.push_async_callback(part.close)
        recorder = RunRecorder(
            folder, settings.run, settings.rollout.retain_journals, _name_making(settings, pool, rollouts, teachers)
        )
        stack.callback(recorder.close)
        trace = SidecarTrace(
            folder if settings.trace == "on" else None,
            lambda: dict.fromkeys(supervisor.names(), min(settings.rollout.max_num_seqs, pacer.opening.num_in_flight)),
        )
        stack.callback(trace.close)
        notes = StartNotes(folder / starting.FILE_NAME, [] if pool is None else pool.warnings)
        hosts = await _unless(ended, _open_hosts(settings, stack))
        if ended.is_set():
            return
        factory = _build_factory(settings, stack, notes, hosts)
        rollout = settings.rollout
        limits = SupervisorConfig(
            max_responses=_count_in_flight(rollout),
            takes_turns=rollout.takes_turns,
            lost_seconds=60 * rollout.lost_minutes,
        )
        supervisor = Supervisor(factory, limits, trace.recorder)
        pacer = _pace(supervisor, settings)
        supervisor.on_joined = recorder.joined
        stack.push_async_callback(supervisor.close)
        num_engines = settings.rollout.num_engines + (0 if hosts is None else hosts.hosts.num_engines)
        async with notes.following(supervisor.status):
            # Mistakes in rewards and flags are reported before those of engines, which may follow from them.
            actions = {
                starting.REWARDS: _start_rewards(pool, settings),
                **({} if rollouts is None else rollouts.list_starts()),
                **({} if teachers is None else {starting.TEACHERS: teachers.start()}),
                starting.FLAGS: _check_flags(settings.rollout),
                starting.ENGINES: supervisor.start(num_engines),
                starting.TOKENIZER: asyncio.to_thread(_build_decode, settings),
            }
            made = await _unless(ended, notes.run(actions))
        if made is None or ended.is_set():
            return
        if hosts is not None:
            stack.push_async_callback(hosts.follow(supervisor).close)
        scorer = NoScorer() if pool is None else PoolScorer(pool, made[starting.TOKENIZER])
        conversations = None if rollouts is None else await rollouts.open(supervisor, trace.recorder, stack)
        measure: Measure = measure_nothing
        if settings.eval_command is not None:
            parsers = None if rollouts is None else rollouts.parsers
            measure = await load_part("eval_command").open_command(settings, supervisor, stack, parsers)
        service = RolloutService(
            supervisor,
            scorer,
            recorder,
            settings.rollout.lease_seconds,
            settings.run,
            trace,
            pacer,
            None if hosts is None else hosts.hosts,
            conversations,
            dict if rollouts is None else rollouts.count,
            measure,
            teachers,
        )
        stack.push_async_callback(service.close)
        add_routes = None
        if open_more is not None:
            add_routes = await open_more(settings, supervisor, made[starting.TOKENIZER], stack)
        loop.add_signal_handler(signal.SIGUSR1, lambda: print(json.dumps(service.status(), indent=2), file=sys.stderr))
        with leaving_out_what_exists():
            await _serve(service, settings, ended, add_routes)


async def _serve(
    service: RolloutService, settings: SidecarSettings, ended: asyncio.Event, add_routes: AddRoutes | None
) -> None:
    folder = settings.folder
    listener = open_listener(*settings.address)
    address = find_url(listener)
    # The token is written before the address: a reader of the address looks for the token next.
    token = _token(folder)
    write_private(folder / ADDRESS_FILE, f"{address}\n".encode())
    _log.info("serving run %s at %s; its token is in %s", settings.run, address, folder / TOKEN_FILE)
    application = build_application(service, token, ended.set)
    if add_routes is not None:
        add_routes(application, functools.partial(renew_lease, service))
    try:
        await serve(application, listener=listener, until=ended)
    finally:
        (folder / ADDRESS_FILE).unlink(missing_ok=True)


def _open_rollouts(settings: SidecarSettings) -> "UserRollouts | None":
    if not settings.environment.has_turns:
        return None
    part = load_part("agents" if settings.environment.source is None else "environments")
    processes, logs = _build_pool_settings(settings), settings.folder / ENGINE_LOGS
    rollouts: UserRollouts = part.open_rollouts(settings, processes, logs)
    return rollouts


async def _open_hosts(settings: SidecarSettings, stack: contextlib.AsyncExitStack) -> "OtherHosts | None":
    if settings.rollout.hosts is None:
        return None
    hosts: OtherHosts = await load_part("hosts").open_hosts(settings.rollout, settings.run, stack)
    return hosts


def _build_pool_settings(settings: SidecarSettings) -> PoolSettings:
    return build_pool_settings(settings.reward, settings.folder, find_secrets(settings.rollout.hosts))


def build_rewards(settings: SidecarSettings, stack: contextlib.AsyncExitStack) -> RewardKind | None:
    """Make the rewards of a run, which are to be started; None if others give them, or none count."""
    reward = settings.reward
    if not reward.functions and (settings.environment.has_turns or not settings.needs_rewards):
        return None
    specs, processes = parse_specs(reward.functions or [], reward.timeout), _build_pool_settings(settings)
    functions = [spec for spec in specs if spec.source not in (CLASSIFIER, JUDGE)]
    is_alone = len(specs) in (1, len(functions))
    kinds: list[RewardKind] = [RewardPool(functions, processes, is_alone)] if functions or not specs else []
    for spec in specs:
        if spec.source == CLASSIFIER:
            kinds.append(make_classifier_pool(spec, processes, reward.model_device, is_alone))
        elif spec.source == JUDGE:
            kinds.append(load_part("judge").open_judge(spec, settings, _count_threads(settings), stack))
    return kinds[0] if is_alone else Rewards(kinds)


def _name_making(
    settings: SidecarSettings, pool: RewardKind | None, rollouts: "UserRollouts | None", teachers: "Teachers | None"
) -> str:
    """Name the way in which groups are made: those that were made in another way are not taken from the journal."""
    identities = [part.identity for part in (pool, rollouts, teachers) if part is not None]
    return " ".join(identities) + (" with experts" if settings.rollout.replay_routing else "")


async def _start_rewards(pool: RewardKind | None, settings: SidecarSettings) -> None:
    """Start the rewards, and try them on the rows that the trainer hands over, if it does."""
    if pool is None:
        return
    await pool.start()
    # A person may start a sidecar with the settings of a run's: nothing hands over rows then.
    if settings.tries_rewards and parent.VARIABLE in os.environ:
        await pool.try_on(await starting.take_trials(settings.folder / starting.TRIALS_FILE))


def _build_factory(
    settings: SidecarSettings, stack: contextlib.AsyncExitStack, notes: StartNotes, hosts: "OtherHosts | None" = None
) -> EngineFactory:
    rollout = settings.rollout
    if rollout.engine == "scripted":
        architecture = settings.read_architecture()
        vocab_size = None if architecture is None else architecture.vocab_size
        return ScriptedFactory(read_script(rollout.script, vocab_size, rollout.max_num_seqs))
    assert settings.hf_model is not None
    config = configure_server(
        rollout,
        settings.hf_model,
        settings.seq_length,
        settings.device,
        _count_threads(settings),
        settings.memory,
        settings.weights_bridge,
    )
    sockets = make_socket_folder()
    stack.callback(shutil.rmtree, sockets, ignore_errors=True)
    logs = settings.folder / ENGINE_LOGS
    make_private_folder(logs)
    deadlines = Deadlines(start=rollout.start_minutes * 60)
    local = VllmFactory(config, sockets, LocalLauncher(), _device_sets(settings), deadlines, logs, notes.note_engine)
    if hosts is None:
        return local
    elsewhere = dataclasses.replace(config, num_threads=rollout.num_threads or 0)
    return hosts.build_factory(local, rollout.num_engines, elsewhere)


def _count_threads(settings: SidecarSettings) -> int:
    """Count the threads of an engine's process on a CPU."""
    rollout = settings.rollout
    # Of a sidecar that is started alone, all cores of the host belong to its engines.
    num_workers = rollout.num_engines * rollout.tensor_parallel_size
    return rollout.num_threads or share_cores(count_cores(), num_ranks=0, num_workers=num_workers).threads_of_worker


async def _check_flags(rollout: RolloutConfig) -> None:
    """Ask vLLM's own parser about the flags that the user adds, in a process of its own: an import takes seconds."""
    words = split_flags(rollout.vllm_args)
    if rollout.engine != "vllm" or not words:
        return
    python = str(rollout.python or sys.executable)
    with tempfile.TemporaryDirectory(prefix="mrl-") as folder:
        await check_with_vllm(python, words, find_packages(python, Path(folder)))


def _device_sets(settings: SidecarSettings) -> tuple[tuple[int, ...], ...]:
    devices, size = settings.rollout.devices or [], settings.rollout.tensor_parallel_size
    return tuple(tuple(devices[start : start + size]) for start in range(0, len(devices), size))


def _count_in_flight(rollout: RolloutConfig) -> int:
    # Twice the number that is sampled at a time: an engine has the next ones at hand, and others can take the rest.
    return 2 * rollout.max_num_seqs if rollout.max_in_flight == "auto" else rollout.max_in_flight


def _pace(supervisor: Supervisor, settings: SidecarSettings) -> Pacer:
    rollout = settings.rollout
    # The choice knows groups that are sampled at once, and not conversations, which wait for their environments.
    is_chosen = rollout.max_in_flight == "auto" and not settings.environment.has_turns
    pacer = Pacer(_count_in_flight(rollout), rollout.max_num_seqs, is_chosen=is_chosen)
    supervisor.pool.pacing = pacer
    pacer.on_room = supervisor.pool.engines_changed
    return pacer


def _build_decode(settings: SidecarSettings) -> Decode:
    if settings.rollout.engine == "scripted" or settings.hf_model is None:
        return lambda sequences: [" ".join(map(str, tokens)) for tokens in sequences]
    return build_decoder(str(settings.hf_model))


async def _unless(ended: asyncio.Event, action: Coroutine[Any, Any, T]) -> T | None:
    """Wait for the action and return its result; if the event is set before, cancel the action and return None."""
    task = asyncio.create_task(action)
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not task.done():
        await cancel(task)
        return None
    return await task


def _token(folder: Path) -> str:
    """Return the run's token, which is made once: a restarted sidecar keeps it."""
    path = folder / TOKEN_FILE
    if not path.exists():
        write_private(path, f"{secrets.token_hex(32)}\n".encode())
    return path.read_text().strip()
