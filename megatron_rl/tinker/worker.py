"""A rank of a service: it does the work that the front hands out, one piece at a time, together with the others.

Rank 0 asks for the next piece and sends its result; the others get the piece from rank 0. A piece that cannot be done
fails on all ranks before anything has changed, and the service continues.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from megatron_rl.command_line.checks import count_interleaved
from megatron_rl.command_line.run import find_pack_multiple
from megatron_rl.config.settings import Settings
from megatron_rl.config.trainer import CheckpointConfig
from megatron_rl.errors import InputError, MegatronRLError, NoRoom
from megatron_rl.observe.timeline import Timeline
from megatron_rl.shared.protocol.client import RolloutClient, RolloutError
from megatron_rl.sidecar.child import OwnSidecar
from megatron_rl.tinker import ADDRESS_FILE, KEY_FILE, packs, work
from megatron_rl.tinker.losses import LOSSES, ServedLoss, find_settings
from megatron_rl.tinker.states import ModelStates
from megatron_rl.tinker.step import ServedStep
from megatron_rl.trainer.data.batch import build_preparation
from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.loop.grpo import build_publisher, connect
from megatron_rl.trainer.loop.rank import Rank
from megatron_rl.trainer.loop.stop import StopRequest
from megatron_rl.trainer.loop.watch import Loop
from megatron_rl.trainer.mcore.checkpoint.checkpointer import Checkpointer
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.forward_step import is_reporter, loss_scale, run_forward_only, run_schedule
from megatron_rl.trainer.mcore.step.optimizer import NonFiniteGradient
from megatron_rl.trainer.mcore.step.policy import Policy, build_policy

_POLL_SECONDS = 5.0
_STEPS = "num_steps"


class Worker(Loop):
    """One rank of the service. Every rank calls each method, but where it says otherwise."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        policy: Policy,
        publisher: Publisher,
        client: RolloutClient,
        stop: StopRequest,
        most_tokens: int,
    ) -> None:
        """Make it; a micro-batch has at most `most_tokens`."""
        self._settings = settings
        self._session = session
        self._policy = policy
        self._publisher = publisher
        self._client = client
        self._stop = stop
        self._most_tokens = most_tokens
        self._states = ModelStates(policy, settings.training.seed)
        self._copier = DeviceCopier(session.platform)
        self._prepare = build_preparation(settings, self._copier.device)
        self._timeline = Timeline()
        self._actions: Mapping[type, Callable[[Any], work.Result]] = {
            work.Create: self._create,
            work.Pass: self._pass,
            work.Step: self._step,
            work.Keep: self._keep,
            work.Recall: self._recall,
            work.Forget: self._forget,
            work.Bring: self._publish,
            work.Score: self._score,
            work.Save: self._save,
            work.Load: self._load,
            work.Export: self._export,
        }

    @property
    def place(self) -> tuple[int, str]:
        return self._timeline.place

    def describe_interrupt(self) -> str:
        return "models that were not saved are lost"

    def tidy(self) -> None:
        self._publisher.close()

    def train(self) -> int:
        """Do work until this process is asked to stop; return the number of pieces."""
        self._stop.begin()
        num_done, last = 0, work.Assigned(number=0, work=work.Forget(names=[]))
        while not any(self._session.gather(self._stop.is_asked)):
            with self._timeline.span("waiting"):
                found = self._session.run_on_first(lambda: self._client.take_work(_POLL_SECONDS))
            assigned = None if found is None else work.ASSIGNED.decode(found)
            if assigned is None:
                continue
            # The same number again: the answer to its result was lost.
            if assigned.number != last.number:
                with self._timeline.span(type(assigned.work).__name__.lower()):
                    result = self.do(assigned.work)
                last, num_done = assigned, num_done + 1
            self._give(assigned.number, result)
        return num_done

    def _give(self, number: int, result: work.Result) -> None:
        self._session.run_on_first(lambda: self._client.give_result(number, msgspec.msgpack.encode(result)))

    def do(self, wanted: work.Work) -> work.Result:
        """Do a piece of work."""
        try:
            return self._actions[type(wanted)](wanted)
        except (InputError, NonFiniteGradient, NoRoom) as error:
            return work.Failed(reason=str(error))

    def _create(self, wanted: work.Create) -> work.Result:
        self._states.create(wanted.model, wanted.seed)
        return work.Done()

    def _pass(self, wanted: work.Pass) -> work.Result:
        state = self._states.use(wanted.model)
        settings = find_settings(wanted.loss, wanted.settings)

        def run() -> list[Any]:
            step = ServedStep(wanted.loss, settings, loss_scale(len(batches)))
            return run_schedule(step, self._policy.wrapped, batches)

        numbers, batches = self._lay_out(wanted.data, LOSSES[wanted.loss])
        if wanted.is_forward_only:
            reports = run_forward_only(ServedStep(wanted.loss, settings, 1.0), self._policy.wrapped, batches)
        else:
            reports = self._states.add_pass(state, run)
        return self._collect(wanted.data, numbers, reports)

    def _score(self, wanted: work.Score) -> work.Result:
        self._states.show_kept(wanted.name)
        whole = [np.frombuffer(one, "<i4") for one in wanted.sequences]
        zeros = [bytes(4 * max(0, len(one) - 1)) for one in whole]
        data = [
            work.Datum(one[:-1].tobytes(), one[1:].tobytes(), {"weights": zero})
            for one, zero in zip(whole, zeros, strict=True)
        ]
        numbers, batches = self._lay_out(data, LOSSES["cross_entropy"])
        step = ServedStep("cross_entropy", find_settings("cross_entropy", {}), 1.0)
        return self._collect(data, numbers, run_forward_only(step, self._policy.wrapped, batches))

    def _lay_out(self, data: Sequence[work.Datum], loss: ServedLoss) -> tuple[list[list[int]], list[packs.ServedBatch]]:
        """Return the numbers of each pack's data, and the micro-batches of this replica: each has equally many."""
        settings, session = self._settings, self._session
        num_parts = settings.transformer.context_parallel_size

        def pack(numbers: Sequence[int]) -> packs.ServedBatch:
            of_pack = [data[number] for number in numbers]
            batch = packs.lay_out(of_pack, find_pack_multiple(settings), settings.architecture.vocab_size, loss)
            self._prepare(batch.pack.layout)
            return dataclasses.replace(batch, pack=batch.pack.divided(num_parts)) if num_parts > 1 else batch

        def lay_out() -> tuple[list[list[int]], list[packs.ServedBatch]]:
            try:
                return divide()
            except MegatronRLError:
                raise
            except Exception as error:
                # Before any rank waits for another: a mistake in one client's data must not end the service.
                raise InputError(f"the data cannot be laid out: {error!r}") from error

        def divide() -> tuple[list[list[int]], list[packs.ServedBatch]]:
            numbers = packs.divide(data, self._most_tokens)
            count = math.ceil(len(numbers) / session.num_replicas)
            if settings.parallel_sizes.virtual_pipeline is not None:
                of_turn = count_interleaved(settings)
                count = math.ceil(count / of_turn) * of_turn
            places = [index * session.num_replicas + session.replica for index in range(max(1, count))]
            return numbers, [pack(numbers[place] if place < len(numbers) else []) for place in places]

        numbers, batches = session.run_or_raise_everywhere(lay_out)
        copied = []
        for batch in batches:
            on_device, arrival = self._copier.copy(batch, batch.pack.layout)
            arrival.wait()
            copied.append(on_device)
        return numbers, copied

    def _collect(
        self, data: Sequence[work.Datum], numbers: Sequence[Sequence[int]], reports: Sequence[Any]
    ) -> work.Result:
        """Bring the log-probs and losses of all replicas together."""
        own = None
        if is_reporter():
            losses = torch.stack([report["loss"] for report in reports]).double().tolist()
            own = losses, [report["log_probs"].float().cpu().numpy() for report in reports]
        log_probs: list[bytes] = [b""] * len(data)
        loss, replica = 0.0, 0
        for of_rank in self._session.gather((self._session.replica, own)):
            replica, found = of_rank
            if found is None:
                continue
            for index, (of_pack, log_probs_N) in enumerate(zip(*found, strict=True)):
                place = index * self._session.num_replicas + replica
                if place >= len(numbers):
                    continue
                loss += of_pack
                of_data = packs.cut(log_probs_N, [data[number] for number in numbers[place]])
                for number, one in zip(numbers[place], of_data, strict=True):
                    log_probs[number] = one
        num_tokens = sum(len(datum.tokens) // 4 for datum in data)
        return work.PassDone(log_probs=log_probs, sums={"loss": loss, "tokens": float(num_tokens)})

    def _step(self, wanted: work.Step) -> work.Result:
        state = self._states.use(wanted.model)
        result = self._states.step(state, wanted)
        return work.StepDone(gradient_norm=result.gradient_norm, num_steps=state.num_steps)

    def _keep(self, wanted: work.Keep) -> work.Result:
        state = self._states.use(wanted.model)
        if not all(self._session.gather(self._states.are_finite())):
            raise InputError(f"weights of {wanted.model} are not finite: lower the learning rate, or load a checkpoint")
        self._states.keep(wanted.name)
        return work.Done(num_steps=state.num_steps)

    def _recall(self, wanted: work.Recall) -> work.Result:
        self._states.leave_room()
        self._read(Path(wanted.folder), has_optimizer=False)
        self._states.keep(wanted.name)
        return work.Done()

    def _forget(self, wanted: work.Forget) -> work.Result:
        self._states.forget(wanted.names)
        return work.Done()

    def _publish(self, wanted: work.Bring) -> work.Result:
        self._states.show_kept(wanted.name)
        try:
            fingerprint = self._publisher.publish(wanted.version)
        except RolloutError as error:
            # All ranks have it. Engines that were lost are started again, and the next publish brings them weights.
            return work.Failed(reason=str(error))
        return work.PublishDone(fingerprint=fingerprint, answer=self._publisher.answer)

    def _save(self, wanted: work.Save) -> work.Result:
        state = self._states.use(wanted.model)
        self._checkpointer(save=Path(wanted.folder)).save(1, {_STEPS: state.num_steps})
        return work.Done(num_steps=state.num_steps)

    def _load(self, wanted: work.Load) -> work.Result:
        self._states.leave_room()
        num_steps = self._read(Path(wanted.folder), wanted.has_optimizer)
        self._states.adopt(wanted.model, num_steps)
        return work.Done(num_steps=num_steps)

    def _read(self, folder: Path, has_optimizer: bool) -> int:
        """Read a checkpoint into the chunks; return the steps that its model had made."""
        loaded = self._checkpointer(load=folder, no_load_optim=not has_optimizer).load()
        if loaded is None:
            raise InputError(f"{folder} holds no checkpoint")
        return int(loaded.extra[_STEPS])

    def _checkpointer(self, **values: Any) -> Checkpointer:
        config = CheckpointConfig(no_save_rng=True, no_load_rng=True, **values)
        # Each step sets its rate itself.
        schedule = dataclasses.replace(self._settings.schedule, override_opt_param_scheduler=True)
        settings = dataclasses.replace(self._settings, checkpoint=config, schedule=schedule)
        return Checkpointer(settings, self._session, self._policy)

    def _export(self, wanted: work.Export) -> work.Result:
        self._states.show_kept(wanted.name)
        policy, folder, dtype = self._policy, Path(wanted.folder), self._settings.publish.dtype
        if policy.base is not None:
            policy.base.save_adapters(self._session, folder, dtype)
        else:
            assert self._settings.model.hf_model is not None
            policy.weights.save_hf(folder, self._settings.model.hf_model, dtype)
        return work.Done()


def build_worker(rank: Rank, sidecar: OwnSidecar | None, stop: StopRequest) -> Worker:
    """Build a rank of the service. Only rank 0 has the sidecar, which starts up meanwhile."""
    settings = rank.settings
    # Every step has a rate of its own.
    optimizer = copy.copy(settings.optimizer)
    optimizer.lr = optimizer.lr or 1e-4
    settings = dataclasses.replace(settings, optimizer=optimizer)
    policy = build_policy(settings, rank.session, settings.num_updates, rank.recipe.build_model)
    rank.startup.say("model: built, its weights are loaded")
    client = connect(rank, sidecar)
    publisher = build_publisher(dataclasses.replace(rank, settings=settings), policy, client, None)
    rank.stack.callback(publisher.close)
    rank.startup.end_part("the rest")
    rank.startup.say("all is ready")
    if rank.session.rank == 0:
        folder = settings.folder
        address, made = (folder / ADDRESS_FILE).read_text().strip(), folder / KEY_FILE
        key = f"$(cat {made})" if made.exists() else "KEY"
        print(f"export TINKER_BASE_URL={address} TINKER_API_KEY={key}", flush=True)
    most_tokens = settings.sizes.largest_micro_batch
    return Worker(settings, rank.session, policy, publisher, client, stop, most_tokens)
