"""Versions that stream: rank 0 sends the tensors to the engines' devices while they load them.

The sidecar tells the engines to join the sender's group and to receive. Rank 0 sends with the engines' library, so both
ends speak the same protocol. Every publish makes a group of its own, because a restarted engine is not a member of an
old one.
"""

import concurrent.futures
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from megatron_rl.config.settings import Settings
from megatron_rl.errors import UsageError
from megatron_rl.platforms import Platform
from megatron_rl.shared.protocol.client import RolloutClient, RolloutError, WorkersChanged
from megatron_rl.shared.protocol.wire import PublishAnswer, StreamSource
from megatron_rl.shared.weights.shards import Bucket
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.publish.publisher import Publisher, Transport, in_background
from megatron_rl.trainer.mcore.publish.senders import (
    Sender,
    find_free_port,
    find_library,
    find_own_address,
    open_sender,
)
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T")

_RETRY_SECONDS = 1.0
_REASON_SECONDS = 5.0


class WholeModel:
    """The tensors to send. Iterating yields them on rank 0, and nothing on other ranks, and all ranks take part."""

    def __init__(self, weights: ModelWeights, session: Session, dtype: str | None):
        self._weights = weights
        self._platform = session.platform
        self._dtype = dtype
        self.manifest = [spec for bucket in weights.stream_specs(dtype) for spec in bucket]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._weights.stream(self._dtype):
            yield from _hand_over(bucket, self._platform)


def _hand_over(bucket: Bucket, platform: Platform) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that may be read on the stream that is current when each tensor is taken.

    vLLM's sender changes its stream in the middle of a bucket, whenever it has filled a buffer. The policy's parameters
    themselves may be read on any stream, since the host has read their fingerprint before.
    """
    if platform.device_type == "cpu":
        yield from bucket
        return
    made = platform.event()
    made.record(platform.current_stream())
    for name, tensor in bucket:
        reading = platform.current_stream()
        reading.wait_event(made)
        # The sender drops a tensor before its stream has read it. The memory must not be reused before that.
        tensor.record_stream(reading)
        yield name, tensor


MakeSender = Callable[[str, str, int, int, WholeModel], Sender]
"""The function that opens a sender, from transport, address, port, group size and model; it waits for the workers."""


class StreamTransport(Transport):
    """A stream from device to device. Rank 0 sends."""

    def __init__(self, transport: Literal["nccl", "hccl"], make_sender: MakeSender = open_sender):
        self._transport: Literal["nccl", "hccl"] = transport
        self._make_sender = make_sender

    def open(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._session = publisher.session
        self._model = WholeModel(publisher.weights, publisher.session, publisher.dtype)

    def send(self, version: int) -> tuple[str, PublishAnswer]:
        publisher = self._publisher
        fingerprint = publisher.weights.fingerprint(publisher.dtype)
        joined = self._session.run_or_raise_everywhere(lambda: self._join(version, fingerprint))
        if joined is None:
            for _ in self._model:
                pass
        else:
            self._send(version, *joined)
        self._session.barrier()
        # The engines have all weights and wait for the probe. No work of the sender is left on the device's queues.
        publisher.prove(version, fingerprint)
        answer = self._session.gather_or_raise_everywhere(
            lambda: None if joined is None else self._await_answer(version, *joined)
        )[0]
        assert answer is not None
        return fingerprint, answer

    def _join(self, version: int, fingerprint: str) -> tuple[Sender, Future[PublishAnswer]] | None:
        """Have the engines told to receive, and wait until their workers are in the group."""
        if self._session.rank != 0:
            return None
        deadline = time.monotonic() + self._publisher.deadline_seconds
        while True:
            try:
                return self._try_to_join(version, fingerprint, deadline)
            except WorkersChanged:
                # An engine started or ended after the workers were counted.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _try_to_join(self, version: int, fingerprint: str, deadline: float) -> tuple[Sender, Future[PublishAnswer]]:
        receiver = self._publisher.receiver
        assert receiver is not None
        world_size = 1 + receiver.num_workers()
        if world_size == 1:
            raise WorkersChanged(f"version {version} was not published: no engine is up")
        # Asked after the workers were counted: the hosts of all that were counted are among these.
        host = find_own_address(receiver.find_engine_hosts())
        port = find_free_port(host)
        manifest = [(spec.name, spec.dtype, list(spec.shape)) for spec in self._model.manifest]
        source = StreamSource(
            transport=self._transport, address=f"{host}:{port}", manifest=manifest, world_size=world_size
        )
        told = self._publisher.announce(version, fingerprint, source)
        opened = self._on_device(lambda: self._make_sender(self._transport, host, port, world_size, self._model))
        futures: list[Future[Any]] = [opened, told]
        concurrent.futures.wait(futures, deadline - time.monotonic(), concurrent.futures.FIRST_COMPLETED)
        if told.done():
            told.result()
        if not opened.done():
            raise RolloutError(
                f"version {version} was not published: {world_size - 1} workers of engines did not connect to "
                f"{source.address} within {self._publisher.deadline_seconds:g} s; check that the engines' hosts reach "
                "this host"
            )
        try:
            return opened.result(), told
        except (OSError, RuntimeError) as error:
            raise RolloutError(
                f"version {version} was not published: rank 0 could not open a group at {source.address}: {error}"
            ) from None

    def _send(self, version: int, sender: Sender, told: Future[PublishAnswer]) -> None:
        """Send all tensors and wait for the end; if the engines fail, raise the sidecar's error."""
        sent = self._on_device(sender.send_weights)
        futures: list[Future[Any]] = [sent, told]
        concurrent.futures.wait(futures, self._publisher.deadline_seconds, concurrent.futures.FIRST_COMPLETED)
        if told.done() and not told.exception():
            # The engines may have received everything before the sending thread reports its end.
            concurrent.futures.wait([sent], _REASON_SECONDS)
        if sent.done() and sent.exception() is not None:
            # The sidecar's reason for a failure says more than the error that it causes here.
            concurrent.futures.wait([told], _REASON_SECONDS)
        if told.done():
            told.result()
        if not sent.done():
            raise self._build_late(version)
        sent.result()

    def _await_answer(self, version: int, sender: Sender, told: Future[PublishAnswer]) -> PublishAnswer:
        """Wait until all engines hold the version."""
        concurrent.futures.wait([told], self._publisher.deadline_seconds)
        if not told.done():
            raise self._build_late(version)
        answer = told.result()
        sender.shutdown()
        return answer

    def _build_late(self, version: int) -> RolloutError:
        seconds = self._publisher.deadline_seconds
        return RolloutError(f"the engines did not receive version {version} within {seconds:g} s")

    def _on_device(self, action: Callable[[], T]) -> Future[T]:
        def run() -> T:
            # Each thread has its own current device.
            self._session.platform.set_device(self._session.device.index or 0)
            return action()

        return in_background(run)


def build(
    settings: Settings, run: str, folder: Path, weights: ModelWeights, session: Session, receiver: RolloutClient | None
) -> StreamTransport:
    """Build the transport of a run, whose platform must have it, and whose rank 0 the engines' library."""
    transport: Any = settings.rollout.transport
    if transport not in session.platform.weight_transports:
        raise UsageError(
            f"--rollout-transport {transport} cannot send from {session.platform.name}: write one of "
            f"{', '.join(session.platform.weight_transports)}"
        )
    session.run_or_raise_everywhere(lambda: find_library(transport) if session.rank == 0 else None)
    return StreamTransport(transport)
