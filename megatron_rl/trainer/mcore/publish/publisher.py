"""The trainer's half of a publish: the policy's weights reach every engine, or the version is not published.

A transport brings the bytes. It says when the engines can be told of a version, and when they wait for the probe. All
else is the same for each transport.
"""

import abc
import datetime
import importlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from megatron_rl.config.settings import Settings
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.wire import FileSource, Proof, PublishAnswer, StreamSource, Weights
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.publish.probe import Probe
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T")


class Transport(abc.ABC):
    """A way from the ranks to the engines. Every rank calls each method."""

    @abc.abstractmethod
    def open(self, publisher: "Publisher") -> None:
        """Check, before the first version, that this publisher's engines can be reached."""

    @abc.abstractmethod
    def send(self, version: int) -> tuple[str, PublishAnswer]:
        """Bring the weights to all engines; return their fingerprint and the sidecar's answer.

        Meanwhile it has the publisher announce the version and prove it, once each.
        """

    def close(self) -> None:
        """Release what is kept between versions."""


TRANSPORTS: Mapping[str, str] = {
    "shm": "megatron_rl.trainer.mcore.publish.files",
    "nccl": "megatron_rl.trainer.mcore.publish.stream",
    "hccl": "megatron_rl.trainer.mcore.publish.stream",
}
"""The modules of the transports, by the values of --rollout-transport."""


def build_transport(
    settings: Settings, run: str, folder: Path, weights: ModelWeights, session: Session, receiver: RolloutClient | None
) -> Transport:
    """Build the transport of a run; `folder` is for its published weights, and rank 0 has the receiver."""
    module = importlib.import_module(TRANSPORTS[settings.rollout.transport])
    return module.build(settings, run, folder, weights, session, receiver)


class Publisher:
    """Brings versions of the policy to the engines; every rank calls it, and rank 0 talks to the sidecar."""

    def __init__(
        self,
        weights: ModelWeights,
        session: Session,
        receiver: RolloutClient | None,
        run: str,
        transport: Transport,
        dtype: str | None = None,
        deadline: datetime.timedelta = datetime.timedelta(minutes=10),
        probe: Probe | None = None,
        proof: Proof = "digests",
        leave: Callable[[], None] | None = None,
    ):
        """Compare the engines' log-probs with `probe`; without it, only with each other. Rank 0 has the receiver.

        With `leave`, which takes all ranks off their devices, a version is announced only after it was called.
        """
        self.answer = PublishAnswer()
        """The sidecar's answer to the last publish."""
        self.weights = weights
        self.session = session
        self.receiver = receiver
        self.dtype = dtype
        self.leave = leave
        self.deadline_seconds = deadline.total_seconds()
        self._run = run
        self._probe = probe
        self._proof: Proof = proof
        self._transport = transport
        transport.open(self)

    def publish(self, version: int) -> str:
        """Publish the weights to all engines, and return their fingerprint."""
        fingerprint, self.answer = self._transport.send(version)
        return fingerprint

    def announce(self, version: int, fingerprint: str, source: FileSource | StreamSource) -> Future[PublishAnswer]:
        """Have rank 0 tell the sidecar of a version, in the background; the answer comes once all engines hold it."""
        message = Weights(
            run=self._run,
            version=version,
            fingerprint=fingerprint,
            source=source,
            dtype=self.dtype or self.weights.architecture.dtype,
            base=self.weights.base,
            probe=b"" if self._probe is None else self._probe.tokens(version),
            deadline_seconds=self.deadline_seconds,
            proof=self._proof,
        )
        return in_background(lambda: self._tell(message))

    def prove(self, version: int, fingerprint: str) -> None:
        """Compute the log-probs of the version's probe, which engines that hold it must match, and send them."""
        if self._probe is not None:
            self._probe.send(version, fingerprint, self.receiver)

    def close(self) -> None:
        self._transport.close()

    def _tell(self, message: Weights) -> PublishAnswer:
        if self.session.rank != 0:
            return self.answer
        assert self.receiver is not None
        return self.receiver.publish(message, self.deadline_seconds)


def in_background(action: Callable[[], T]) -> Future[T]:
    """Run the action in a daemon thread: a wait for a dead peer has no end, and must not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
