"""The trainer's half of a publish in which every rank sends its own parts: one transfer for each pipeline stage.

The senders of a stage are the tensor-parallel ranks of its first replica. They and all workers of the engines make a
group for the stage's transfer, which ends with it. The stages follow each other. Every rank of a stage takes part in
gathering the tensors whose layout cannot be sent from where they lie.

Transfers run in background threads, since a wait for a dead peer has no end. Meanwhile the ranks tell each other how
far they are, so an error on one of them, or of the sidecar on rank 0, is soon raised on all. No rank begins to send or
to gather before all senders of its stage and all workers are in the group: until then a publish may be tried again.
"""

import concurrent.futures
import dataclasses
import datetime
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.shared.protocol.client import RolloutError, WorkersChanged
from megatron_rl.shared.protocol.stage_group import TRANSPORT, StageGroup
from megatron_rl.shared.protocol.wire import ProbeAnswer, Proof, PublishAnswer, StageStream, Weights
from megatron_rl.shared.weights.fingerprint import DTYPES
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.shards import Bucket
from megatron_rl.shared.weights.stage_layout import LaidOutTensor, list_sent_parts
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.publish.own_address import find_free_port, find_own_address
from megatron_rl.trainer.mcore.publish.probe import Probe
from megatron_rl.trainer.mcore.publish.shared_memory import in_background
from megatron_rl.trainer.mcore.publish.stream import Sender
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T")

_RETRY_SECONDS = 1.0
_REASON_SECONDS = 5.0
_POLL_SECONDS = 0.05


class StageReceiver(Protocol):
    """The rollout client, which tells the engines to receive."""

    def count_engines(self) -> tuple[int, int]: ...

    def find_engine_hosts(self) -> list[str]: ...

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer: ...

    def probed(self, answer: ProbeAnswer) -> None: ...


class StageModel:
    """The tensors of this rank's stage. Iterating yields this sender's parts, and nothing on ranks that do not send.

    If some are gathered, every iteration is a collective of the stage's ranks.
    """

    def __init__(self, weights: ModelWeights, session: Session, dtype: str | None, bucket_bytes: int = 1 << 28):
        self._weights = weights
        self._session = session
        self._layout, self._gathering = weights.lay_out_stage(dtype, bucket_bytes)
        self.is_sender = session.rank in self.senders
        self.is_needed = self.is_sender or self._gathering is not None
        """True if this rank sends, or gathers with those that do."""

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks that send, in their order."""
        return self._layout.senders

    @property
    def tensors(self) -> tuple[LaidOutTensor, ...]:
        """The tensors in the order in which they are sent."""
        return self._layout.tensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.is_sender:
            yield from list_sent_parts(self._weights.shards, self.tensors)
        if self._gathering is not None:
            buckets = self._gathering.buckets(self._weights.shards)
            for specs, bucket in zip(self._gathering.specs, buckets, strict=True):
                if self.is_sender:
                    yield from self._share(specs, dict(bucket))

    def _share(self, specs: list[TensorSpec], whole: dict[str, torch.Tensor]) -> Bucket:
        """Give the tensors that the first sender has gathered to the other senders."""
        if len(self.senders) == 1:
            return list(whole.items())
        shared = []
        for spec in specs:
            tensor = whole.get(spec.name)
            if tensor is None:
                tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=self._session.device)
            dist.broadcast(tensor, self.senders[0], group=parallel_state.get_tensor_model_parallel_group())
            shared.append((spec.name, tensor))
        return shared


MakeSender = Callable[[StageGroup, StageModel], Sender]
"""The function that opens a sender; it waits for the other senders and for the workers."""


@dataclasses.dataclass(frozen=True)
class _Receivers:
    """The engines that a publish reaches."""

    num_engines: int
    num_workers: int
    """The workers of each of them."""


class StagePublisher:
    """Publishes from every rank's device to those of the engines. Rank 0 talks to the sidecar."""

    def __init__(
        self,
        weights: ModelWeights,
        session: Session,
        receiver: StageReceiver | None,
        run: str,
        make_sender: MakeSender,
        dtype: str | None = None,
        deadline: datetime.timedelta = datetime.timedelta(minutes=10),
        probe: Probe | None = None,
        proof: Proof = "digests",
    ):
        """Compare the engines' log-probs with `probe`; without it, only with each other."""
        self.answer = PublishAnswer()
        self._probe = probe
        self._proof: Proof = proof
        self._weights = weights
        self._session = session
        self._receiver = receiver
        self._run = run
        self._dtype = dtype
        self._deadline = deadline.total_seconds()
        self._make_sender = make_sender
        self._model = StageModel(weights, session, dtype)
        stage_size = session.world_size // session.sizes.pipeline
        self._stage = session.rank // stage_size
        by_rank = session.gather(self._model.tensors)
        self._tensors = [by_rank[stage * stage_size] for stage in range(session.sizes.pipeline)]
        """The tensors of each stage."""

    def publish(self, version: int) -> str:
        """Publish the weights to all engines, and return their fingerprint."""
        fingerprint, digests = self._weights.announce(self._dtype)
        deadline = time.monotonic() + self._deadline
        while True:
            try:
                told = self._send_all(version, fingerprint, digests, deadline)
                break
            except WorkersChanged:
                # An engine started or ended after the workers were counted.
                if not self._session.broadcast(time.monotonic() < deadline):
                    raise
                time.sleep(_RETRY_SECONDS)
        # The engines have all weights and wait for the probe. No work of the senders is left on the devices' queues.
        if self._probe is not None:
            self._probe.send(version, fingerprint, self._receiver)
        answer = self._session.gather_or_raise_everywhere(lambda: self._await_answer(version, told))[0]
        assert answer is not None
        self.answer = answer
        return fingerprint

    def close(self) -> None:
        """Do nothing, since this publisher keeps nothing between versions."""

    def _send_all(
        self, version: int, fingerprint: str, digests: dict[str, list[int]], deadline: float
    ) -> Future[PublishAnswer] | None:
        """Have the engines told to receive, and send the tensors of all stages; rank 0 gets the engines' answer."""
        session = self._session
        engines = session.gather_or_raise_everywhere(lambda: self._count(version))[0]
        assert engines is not None
        hosts = session.gather_or_raise_everywhere(
            lambda: None if self._receiver is None else self._receiver.find_engine_hosts()
        )[0]
        assert hosts is not None
        is_first = session.rank == self._model.senders[0]
        addresses = session.gather_or_raise_everywhere(lambda: _find_place(hosts) if is_first else None)
        opened = [address for address in addresses if address is not None]
        told = None
        if self._receiver is not None:
            receiver, message = self._receiver, self._describe(version, fingerprint, digests, engines, opened)
            told = in_background(lambda: receiver.publish(message, self._deadline))
        for stage, address in enumerate(opened):
            opening: Future[Sender] | None = None
            if stage == self._stage and self._model.is_sender:
                opening = self._on_device(functools.partial(self._open, engines, *address))
            not_open = f"the group of stage {stage} was not complete: check that the engines' hosts reach every rank's"
            self._follow(opening, told, version, deadline, not_open)
            sending: Future[None] | None = None
            if stage == self._stage and self._model.is_needed:
                sending = self._on_device(functools.partial(self._send, None if opening is None else opening.result()))
            self._follow(sending, told, version, deadline, f"the engines had not received stage {stage}")
        return told

    def _count(self, version: int) -> _Receivers | None:
        if self._receiver is None:
            return None
        num_engines, num_workers = self._receiver.count_engines()
        if not num_engines:
            raise WorkersChanged(f"version {version} was not published: no engine is up")
        if num_workers % num_engines:
            raise RolloutError(
                f"version {version} was not published: {TRANSPORT} needs engines with one number of workers, and "
                f"{num_engines} engines have {num_workers}: write --rollout-transport nccl"
            )
        return _Receivers(num_engines, num_workers // num_engines)

    def _describe(
        self,
        version: int,
        fingerprint: str,
        digests: dict[str, list[int]],
        engines: _Receivers,
        addresses: list[tuple[str, int]],
    ) -> Weights:
        specs = [tensor.spec for stage in self._tensors for tensor in stage]
        num_senders = len(self._model.senders)
        return Weights(
            run=self._run,
            version=version,
            fingerprint=fingerprint,
            transport="nccl_m2n",
            dtype=self._dtype or self._weights.architecture.dtype,
            stages=[
                StageStream(
                    location=f"{host}:{port}",
                    dims=[tensor.dim for tensor in tensors],
                )
                for tensors, (host, port) in zip(self._tensors, addresses, strict=True)
            ],
            probe=b"" if self._probe is None else self._probe.tokens(version),
            manifest=[(spec.name, spec.dtype, list(spec.shape)) for spec in specs],
            digests=[digests[spec.name] for spec in specs],
            num_senders=num_senders,
            world_size=num_senders + engines.num_engines * engines.num_workers,
            deadline_seconds=self._deadline,
            proof=self._proof,
        )

    def _open(self, engines: _Receivers, host: str, port: int) -> Sender:
        """Join the group of this rank's stage."""
        rank = self._model.senders.index(self._session.rank)
        return self._make_sender(StageGroup(host, port, rank, engines.num_engines, engines.num_workers), self._model)

    def _send(self, sender: Sender | None) -> None:
        """Take this rank's part in the transfer of its stage."""
        if sender is None:
            for _ in self._model:
                pass
        else:
            sender.send_weights()
            sender.shutdown()

    def _follow(
        self, own: Future[Any] | None, told: Future[PublishAnswer] | None, version: int, deadline: float, late: str
    ) -> None:
        """Wait until every rank has done its own part; if one fails, raise its error on all."""

        def look() -> bool:
            if own is not None:
                concurrent.futures.wait([own], _POLL_SECONDS)
            if told is not None and told.done():
                told.result()
            if own is None:
                return True
            if own.done():
                own.result()
                return True
            if time.monotonic() > deadline:
                raise RolloutError(f"version {version} was not published: after {self._deadline:g} s {late}")
            return False

        try:
            while not all(self._session.gather_or_raise_everywhere(look)):
                pass
        except WorkersChanged:
            raise
        except Exception:
            # The sidecar's reason for a failure says more than the error that it causes here.
            self._session.run_or_raise_everywhere(lambda: None if told is None else _raise_reason(told))
            raise

    def _await_answer(self, version: int, told: Future[PublishAnswer] | None) -> PublishAnswer | None:
        """Wait until all engines hold the version."""
        if told is None:
            return None
        concurrent.futures.wait([told], self._deadline)
        if not told.done():
            raise RolloutError(f"the engines did not receive version {version} within {self._deadline:g} s")
        return told.result()

    def _on_device(self, action: Callable[[], T]) -> Future[T]:
        def run() -> T:
            # Each thread has its own current device.
            self._session.platform.set_device(self._session.device.index or 0)
            return action()

        return in_background(run)


def _find_place(hosts: list[str]) -> tuple[str, int]:
    """Return the address at which these hosts reach this one, and a free port."""
    address = find_own_address(hosts)
    return address, find_free_port(address)


def _raise_reason(told: Future[PublishAnswer]) -> None:
    """Raise the sidecar's error if it comes soon."""
    concurrent.futures.wait([told], _REASON_SECONDS)
    if told.done():
        told.result()
