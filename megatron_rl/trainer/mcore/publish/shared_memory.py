"""The trainer's half of a publish: the policy's weights reach every engine, or the version is not published.

From files in memory, engines load the first tensors while the last ones are written. This is possible because the
fingerprint, which is announced to them, is computed before. Once all engines hold version v, the files of v-1 are
reused for v+1: the system need not find and clear new memory at every publish.

Engines that can copy from the ranks' devices (`offers.py`) wait for no file.
"""

import contextlib
import datetime
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from megatron_rl.errors import PlatformError
from megatron_rl.shared.protocol.wire import ProbeAnswer, Proof, PublishAnswer, Weights
from megatron_rl.shared.weights.folders import is_in_memory
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.publish.hosts import Deliveries
from megatron_rl.trainer.mcore.publish.offers import Offers, Through
from megatron_rl.trainer.mcore.publish.probe import Probe
from megatron_rl.trainer.mcore.session import Session

T = TypeVar("T")
_REMEDY = (
    "Stream the weights (--rollout-transport nccl or hccl), name a --publish-folder that all hosts share, or have one "
    "host hold a whole replica"
)


class Publisher(Protocol):
    """Brings versions of the policy to the engines; every rank calls it."""

    @property
    def answer(self) -> PublishAnswer:
        """The sidecar's answer to the last publish."""
        ...

    def publish(self, version: int) -> str:
        """Publish the weights to all engines, and return their fingerprint."""
        ...

    def close(self) -> None: ...


class FilesReceiver(Protocol):
    """The rollout client, which hands a version to the engines."""

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer: ...

    def probed(self, answer: ProbeAnswer) -> None: ...


class SharedMemoryPublisher:
    """Publishes through files in a folder of the run's own, whose parent trainer and engines share.

    Rank 0 talks to the sidecar. A rank that writes a part of the weights must find rank 0's folder, unless all engines
    get them over the network. A rank that holds only copies of other ranks' parts need not.
    """

    def __init__(
        self,
        weights: ModelWeights,
        session: Session,
        receiver: FilesReceiver | None,
        run: str,
        folder: Path,
        dtype: str | None = None,
        deadline: datetime.timedelta = datetime.timedelta(minutes=10),
        probe: Probe | None = None,
        proof: Proof = "digests",
        through: Through = "auto",
        hosts: Deliveries | None = None,
    ):
        """Compare the engines' log-probs with `probe`; without it, only with each other.

        `through` says whether engines copy from the ranks' devices: if they can, never, or always. `hosts` brings
        the weights to engines on other hosts.
        """
        self.answer = PublishAnswer()
        self._probe = probe
        self._proof: Proof = proof
        self._weights = weights
        self._session = session
        self._receiver = receiver
        self._run = run
        self._dtype = dtype
        self._deadline = deadline
        self._folder = folder
        self._hosts = hosts
        # The folder of the version that engines sample with, and a folder that no engine reads any more.
        self._current: Path | None = None
        self._spare: Path | None = None
        self._begin()
        self._offers = Offers(weights, session, through, dtype, self._is_read_early)

    def publish(self, version: int) -> str:
        """Publish the weights to all engines, and return their fingerprint."""
        folder = self._folder / f"version-{version}"
        if self._lays_out:
            # A failed attempt may have left the folder.
            shutil.rmtree(folder, ignore_errors=True)
        spare, self._spare = self._spare, None
        begun = self._weights.begin_files(folder, self._dtype, spare, self._is_read_early, self._lays_out)
        fingerprint = begun.fingerprint
        is_offered = self._offers.put(folder, fingerprint)
        message = Weights(
            run=self._run,
            version=version,
            fingerprint=fingerprint,
            transport="shm",
            dtype=self._dtype or self._weights.architecture.dtype,
            location=str(folder),
            base=self._weights.base,
            probe=b"" if self._probe is None else self._probe.tokens(version),
            deadline_seconds=self._deadline.total_seconds(),
            proof=self._proof,
        )
        with contextlib.ExitStack() as sending:
            with begun:
                delivery = None if self._hosts is None else sending.enter_context(self._hosts.begin(version, begun))
                if self._is_read_early:
                    told = in_background(lambda: self._send(message))
                if is_offered:
                    # Engines wait for the probe, and for no file.
                    self._send_probe(version, fingerprint)
                begun.write(None if delivery is None else delivery.note)
            if not self._is_read_early:
                told = in_background(lambda: self._send(message))
            # Engines load while this rank computes the probe.
            if not is_offered:
                self._send_probe(version, fingerprint)
            if delivery is not None:
                delivery.finish(lambda: told.done() and told.exception() is not None)
        self.answer = self._session.gather_or_raise_everywhere(told.result)[0]
        self._offers.withdraw(folder, self._deadline.total_seconds())
        self._offers.end(self.answer)
        # A restarted engine loads the current version, so no engine reads the previous one again.
        if self._current != folder:
            self._spare = self._current
        self._current = folder
        return fingerprint

    def close(self) -> None:
        """Remove the run's files."""
        self._weights.forget_files()
        if self._hosts is not None:
            self._hosts.forget_files()
        if self._lays_out:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _begin(self) -> None:
        """Make the folder, and check that every rank that writes weights finds it.

        If hosts get the weights over the network, the ranks of each host may have a folder of their own.
        """
        session, folder = self._session, self._folder
        session.run_or_raise_everywhere(lambda: _own_folder(folder) if session.rank == 0 else None)
        # The mark tells this folder from one of the same name on another host.
        mark = folder / f"of-rank-0-{session.broadcast(secrets.token_hex(8))}"
        session.run_or_raise_everywhere(lambda: mark.touch(mode=0o600) if session.rank == 0 else None)
        is_apart = self._weights.is_written_here and not mark.exists()
        places = session.gather((socket.gethostname(), str(folder)) if is_apart else None)
        if any(places):
            obstacle = _REMEDY if self._hosts is None else self._hosts.find_obstacle(_REMEDY)
            session.run_or_raise_everywhere(lambda: _refuse(folder, session.rank, obstacle) if is_apart else None)
        is_first = is_apart and places.index(places[session.rank]) == session.rank
        session.run_or_raise_everywhere(lambda: _own_folder(folder) if is_first else None)
        self._lays_out = session.rank == 0 or is_first
        # Only in memory does every process see at once what another process writes.
        self._is_read_early = session.broadcast(session.rank == 0 and is_in_memory(folder))
        if session.rank == 0:
            mark.unlink()

    def _send_probe(self, version: int, fingerprint: str) -> None:
        if self._probe is not None:
            self._probe.send(version, fingerprint, self._receiver)

    def _send(self, message: Weights) -> PublishAnswer:
        if self._session.rank != 0:
            return self.answer
        assert self._receiver is not None
        return self._receiver.publish(message, self._deadline.total_seconds())


def _own_folder(folder: Path) -> None:
    """Make the folder and its parent for this user alone; refuse a folder that another user made first.

    Remove the files that the run left there when it was killed, because nothing else removes them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PlatformError(
                f"{path} belongs to user {status.st_uid} and has mode {status.st_mode & 0o777:o}: "
                f"it must belong to this user and have mode 700; remove it, or choose another folder"
            )


def _refuse(folder: Path, rank: int, obstacle: str | None) -> None:
    if obstacle is not None:
        raise PlatformError(
            f"rank {rank} on {socket.gethostname()} writes a part of the weights, and does not find rank 0's folder "
            f"{folder}. {obstacle}"
        )


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
