"""From settings to a run: what is made, in which order, and taken down again."""

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable

import torch.distributed as dist

from megatron_rl.algorithm.objective import Objective
from megatron_rl.arguments.plan import check_folders, shared_folder
from megatron_rl.arguments.run import RunSettings
from megatron_rl.config.settings import Settings
from megatron_rl.data.prompts import PromptSource, load_prompts
from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.mcore.checkpoint.schedule import check_loaded_schedule
from megatron_rl.mcore.publish.probe import Probe
from megatron_rl.mcore.publish.shared_memory import Publisher, SharedMemoryPublisher
from megatron_rl.mcore.publish.stream import StreamPublisher
from megatron_rl.mcore.session import Session, start_session
from megatron_rl.mcore.step.policy import Reference, build_policy, build_reference
from megatron_rl.mcore.step.tri_model import build_roles
from megatron_rl.observe import metrics, samples
from megatron_rl.observe.metrics import read
from megatron_rl.observe.report import Places, print_report
from megatron_rl.observe.startup import Startup, describe_model, describe_prompts
from megatron_rl.observe.timeline import Timeline
from megatron_rl.protocol.client import RolloutClient
from megatron_rl.protocol.slots import Division
from megatron_rl.protocol.wire import Sampling
from megatron_rl.records.audit_log import FILE_NAME as AUDIT_FILE
from megatron_rl.sidecar.child import Address, OwnSidecar, given_address
from megatron_rl.sidecar.making import tokenizer_decoder
from megatron_rl.sidecar.vllm import sender
from megatron_rl.training.checkpoints import Checkpoints
from megatron_rl.training.evaluator import Evaluator
from megatron_rl.training.learner import Learner
from megatron_rl.training.lifelines import listen
from megatron_rl.training.mismatch import build_mismatch_bounds
from megatron_rl.training.reporter import Reporter, reporter_of
from megatron_rl.training.rollouts import Periodic, Rollouts, Schedule, Sync, build_batcher
from megatron_rl.training.stop import StopRequest
from megatron_rl.training.trainer import Trainer
from megatron_rl.training.watch import Watch, meets_in_an_agent
from megatron_rl.weights.mapping import Mapping
from megatron_rl.weights.reader import Checkpoint


def train(
    settings: RunSettings,
    make: "type[Run] | None" = None,
    watch: Watch | None = None,
    startup: Startup | None = None,
) -> int:
    """One rank of a run, from start to end; returns the exit code. `make` puts other parts in, for benchmarks.

    `watch` is there where the ranks have watched each other since their processes began, and `startup` where it
    counts from then on.
    """
    watch, startup = watch or Watch.of_environment(), startup or Startup()
    is_first = int(os.environ.get("RANK", "0")) == 0
    stop = StopRequest(settings.loop.grace_seconds).install()
    stop.tidy = watch.tell
    with contextlib.ExitStack() as stack:
        prompts, sidecar = None, None
        if is_first:
            if settings.observe.progress != "none":
                startup.show(sys.stdout)
            # What is wrong with folders, data and weights shows before a process is started.
            check_folders(settings)
            startup.say("prompts: they are read and tokenized")
            prompts = _prompts(settings)
            startup.say(describe_prompts(prompts.num_rows, prompts.num_held_out, prompts.num_read))
            _check_weights(settings)
            check_loaded_schedule(settings, _num_updates(settings))
            for note in (*settings.notes, *prompts.notes):
                print(f"note: {note}", file=sys.stderr)
            if settings.sidecar is not None:
                sidecar = OwnSidecar(settings.sidecar, prompts.first)
                startup.say(f"sidecar: started, its log is {sidecar.log}")
                stack.callback(sidecar.close)
        # A rank may wait for engines to start, and then for an iteration's last group.
        waiting = datetime.timedelta(minutes=settings.service.start_minutes + settings.service.deadline_minutes)
        with watch, contextlib.ExitStack() as parts:
            with contextlib.nullcontext() if sidecar is None else sidecar.watched(watch.fail, startup.say):
                session = start_session(settings, waiting, functools.partial(meet, watch))
                startup.say(describe_model(settings, session.platform.name, session.world_size))
                run = (make or Run)(settings, session, prompts, stop, parts)
                startup.say("model: built, its weights are loaded")
                run.connect(sidecar)
            watch.tidy = run.tidy
            stop.tidy = functools.partial(_leave, run, watch)
            code = run.train(startup)
        session.close()
        return code


def _leave(run: "Run", watch: Watch, reason: MegatronRLError) -> None:
    try:
        run.tidy()
    finally:
        watch.tell(reason)


class Run:
    """The parts of a run on one rank."""

    def __init__(
        self,
        settings: RunSettings,
        session: Session,
        prompts: PromptSource | None,
        stop: StopRequest,
        stack: contextlib.ExitStack,
    ):
        self._settings = settings
        self._sizes = settings.sizes
        self._folder = settings.folder
        self._name = settings.folder.resolve().name
        self._session = session
        self._prompts = prompts
        self._stop = stop
        self._stack = stack
        assert settings.training.train_iters is not None
        self._num_iterations = settings.training.train_iters
        self._policy = build_policy(settings, session, _num_updates(settings))
        self._reference = _reference(settings, session)
        self._checkpoints = Checkpoints(
            settings,
            session,
            self._policy,
            self._name,
            prompts,
            self._reference,
        )
        self._version = self._checkpoints.load(self._say)
        self._closing: Callable[[], None] = lambda: None

    def connect(self, sidecar: OwnSidecar | None) -> None:
        """Wait for the sidecar and take it for this run."""
        settings, session = self._settings, self._session
        minutes = settings.service.start_minutes

        def find() -> Address | None:
            if session.rank != 0:
                return None
            return given_address(settings) if sidecar is None else sidecar.address(minutes * 60)

        address = session.broadcast(session.run_or_raise_everywhere(find))
        assert address is not None
        client = address.client(settings.service.patience_seconds)
        self._client: RolloutClient = self._stack.enter_context(client)
        lease = session.run_or_raise_everywhere(lambda: client.take_lease(self._name) if session.rank == 0 else 0)
        client.use_lease(session.broadcast(lease))
        self.publisher = self._publisher(client)
        self._stack.callback(self.publisher.close)

    def _publisher(self, client: RolloutClient) -> Publisher:
        settings, session = self._settings, self._session
        receiver = client if session.rank == 0 else None
        transport, dtype = settings.rollout.transport, settings.publish.dtype
        deadline = datetime.timedelta(minutes=settings.publish.deadline_minutes)
        sizes, chunks = settings.sizes, self._policy.chunks
        longest = sizes.longest_prompt + sizes.longest_response
        probe = Probe(chunks, session, self._name, longest, sizes.multiple_of, settings.publish.probe_bound)
        if transport == "shm":
            folder = shared_folder(settings)
            weights = self._policy.weights
            return SharedMemoryPublisher(weights, session, receiver, self._name, folder, dtype, deadline, probe)
        if transport not in session.platform.weight_transports:
            raise UsageError(
                f"--rollout-transport {transport} cannot send from {session.platform.name}: write one of "
                f"{', '.join(session.platform.weight_transports)}"
            )
        session.run_or_raise_everywhere(lambda: sender.library(transport) if session.rank == 0 else None)
        make = sender.open_sender
        weights = self._policy.weights
        return StreamPublisher(weights, session, receiver, self._name, transport, make, dtype, deadline, probe)

    def tidy(self) -> None:
        """What a run that is ended does at last: the terminal as it was, and no weights left in memory."""
        try:
            self._closing()
        finally:
            self.publisher.close()

    def train(self, startup: Startup) -> int:
        timeline = Timeline()
        reporter = self._reporter(timeline, startup)
        trainer = Trainer(
            session=self._session,
            policy=self._policy,
            publisher=self.publisher,
            rollouts=self.rollouts(lambda: timeline.span("wait")),
            learner=self._learner(lambda: timeline.span("update")),
            checkpoints=self._checkpoints,
            evaluator=self._evaluator(),
            reporter=reporter,
            timeline=timeline,
            stop=self._stop,
            reference=self._reference,
            largest_micro_batch=self._sizes.largest_micro_batch,
            mismatch_bounds=build_mismatch_bounds(self._settings, self._policy.weights.dtype),
        )
        trainer.train(self._version, self._num_iterations)
        self._stop.over()
        if reporter is not None:
            reporter.close()
            print_report(read(self._folder), self._places(), sys.stdout)
        return ExitCode.OK

    def rollouts(self, waiting: Callable[[], contextlib.AbstractContextManager]) -> Rollouts:
        is_sync = self._settings.loop.schedule == "sync"
        return self.rollouts_of(self._sizes.division, Sync(self._session) if is_sync else Periodic(), waiting)

    def rollouts_of(
        self, division: Division, schedule: Schedule, waiting: Callable[[], contextlib.AbstractContextManager]
    ) -> Rollouts:
        settings, session = self._settings, self._session
        return Rollouts(
            self._client,
            session,
            self._name,
            division,
            self._sampling(settings.sampling.temperature),
            build_batcher(settings, session.device),
            schedule,
            settings.service.deadline_minutes * 60,
            self._prompts,
            waiting,
        )

    def _learner(self, updating: Callable[[], contextlib.AbstractContextManager]) -> Learner:
        sizes = self._sizes
        roles = build_roles(self._settings, self._session, self._policy, self._reference, sizes.plan.num_updates)
        objective = Objective(self._settings.algorithm, sizes.longest_response)
        return Learner(self._policy, roles, objective, self._session, updating)

    def _sampling(self, temperature: float) -> Sampling:
        sampling = self._settings.sampling
        return Sampling(
            max_tokens=self._sizes.longest_response,
            temperature=temperature,
            stop_token_ids=sampling.stop_token_ids or [],
            ignore_eos=sampling.ignore_eos,
        )

    def _evaluator(self) -> Evaluator | None:
        settings = self._settings
        if self._prompts is None or settings.evaluation.interval is None:
            return None
        return Evaluator(
            settings.evaluation,
            self._client,
            self._name,
            self._prompts.held_out(settings.evaluation.num_prompts),
            self._sampling(settings.evaluation.temperature),
            settings.service.deadline_minutes * 60,
        )

    def _reporter(self, timeline: Timeline, startup: Startup) -> Reporter | None:
        if self._session.rank != 0:
            return None
        assert self._settings.model.hf_model is not None
        decode = tokenizer_decoder(str(self._settings.model.hf_model))
        reporter = reporter_of(
            self._settings, self._folder, self._version, self._num_iterations, self._sizes.plan.num_prompts, decode
        )
        self._stack.callback(reporter.close)
        reporter.follow(self._client.status)
        self._closing = reporter.close
        startup.say("all is ready")
        timeline.restart(startup.seconds)
        return reporter

    def _say(self, text: str) -> None:
        if self._session.rank == 0:
            print(f"note: {text}", file=sys.stderr)

    def _places(self) -> Places:
        settings = self._settings
        return Places(
            checkpoint=self._checkpoints.last_saved,
            hf_weights=self._checkpoints.last_hf,
            metrics=self._folder / metrics.FILE_NAME,
            samples=self._folder / samples.FILE_NAME,
            audit_log=self._folder / AUDIT_FILE,
            tensorboard=settings.observe.tensorboard_dir,
        )


def _prompts(settings: RunSettings) -> PromptSource:
    assert settings.model.hf_model is not None
    prompts = load_prompts(
        settings.data,
        settings.model.hf_model,
        seed=settings.training.seed,
        longest=settings.sizes.longest_prompt,
        vocab_size=settings.architecture.vocab_size,
    )
    if settings.evaluation.interval is not None and not prompts.num_held_out:
        raise UsageError(
            f"--eval-interval {settings.evaluation.interval} has no prompts to evaluate on: write --prompts-held-out "
            "or --eval-prompts, or drop it"
        )
    return prompts


def _num_updates(settings: RunSettings) -> int:
    assert settings.training.train_iters is not None
    return settings.training.train_iters * settings.sizes.plan.num_updates


def _check_weights(settings: Settings) -> None:
    """An InputError unless the folders hold the architecture's tensors."""
    reference = settings.algorithm.ref_model if settings.algorithm.kl_beta else None
    for folder in (settings.model.hf_model, reference):
        if folder is not None:
            with Checkpoint(folder) as checkpoint:
                checkpoint.check(Mapping(settings.architecture))


def _reference(settings: Settings, session: Session) -> Reference | None:
    """Where the divergence counts for nothing there is none."""
    if settings.algorithm.kl_beta == 0:
        return None
    folder = settings.algorithm.ref_model or settings.model.hf_model
    assert folder is not None
    return build_reference(settings, session, folder)


def meet(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """The store, once this rank is connected to it; from then on at the latest the ranks watch each other."""
    if watch.is_connected:
        return _store_of_rank_0(watch, timeout)
    store, _, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if world_size > 1 and meets_in_an_agent():
        watch.connect_through(store)
    return store


def _store_of_rank_0(watch: Watch, timeout: datetime.timedelta) -> dist.Store:
    """At a port that rank 0 tells the others: the one that all of them know is where they watch each other."""
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
