"""Versions in files: ranks write them into a folder whose parent engines share, and engines load them from there.

From files in memory, engines load the first tensors while the last ones are written. This is possible because the
fingerprint, which is announced to them, is computed before. Once all engines hold version v, the files of v-1 are
reused for v+1: the system need not find and clear new memory at every publish.

Engines that can copy from the ranks' devices (`offers.py`) wait for no file. Engines that have these devices by turns
are told of a version when all of it is written, its probe is computed, and the ranks are off their devices. Engines on
other hosts get what ranks send them from the files (`hosts.py`).
"""

import contextlib
import os
import secrets
import shutil
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.settings import Settings
from megatron_rl.errors import PlatformError
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.wire import FileSource, PublishAnswer
from megatron_rl.shared.weights.folders import is_in_memory
from megatron_rl.trainer.mcore.model.weights import ModelWeights
from megatron_rl.trainer.mcore.publish.offers import Offers, Through
from megatron_rl.trainer.mcore.publish.publisher import Publisher, Transport
from megatron_rl.trainer.mcore.session import Session

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.publish.hosts import Deliveries

_REMEDY = (
    "Stream the weights (--rollout-transport nccl or hccl), name a --publish-folder that all hosts share, or have one "
    "host hold a whole replica"
)


class FilesTransport(Transport):
    """Files in a folder of the run's own.

    A rank that writes a part of the weights must find rank 0's folder, unless all engines get them over the network. A
    rank that holds only copies of other ranks' parts need not.
    """

    def __init__(self, folder: Path, through: Through = "auto", hosts: "Deliveries | None" = None):
        """`through` says whether engines copy from the ranks' devices: if they can, never, or always.

        `hosts` brings the weights to engines on other hosts.
        """
        self._folder = folder
        self._through: Through = through
        self._hosts = hosts
        # The folder of the version that engines sample with, and a folder that no engine reads any more.
        self._current: Path | None = None
        self._spare: Path | None = None

    def open(self, publisher: Publisher) -> None:
        """Make the folder, and check that every rank that writes weights finds it.

        If hosts get the weights over the network, the ranks of each host may have a folder of their own.
        """
        self._publisher = publisher
        session, folder = publisher.session, self._folder
        session.run_on_first(lambda: _own_folder(folder))
        # The mark tells this folder from one of the same name on another host.
        mark = folder / f"of-rank-0-{session.broadcast(secrets.token_hex(8))}"
        session.run_on_first(lambda: mark.touch(mode=0o600))
        is_apart = publisher.weights.is_written_here and not mark.exists()
        places = session.gather((socket.gethostname(), str(folder)) if is_apart else None)
        if any(places):
            obstacle = _REMEDY if self._hosts is None else self._hosts.find_obstacle(_REMEDY)
            session.run_or_raise_everywhere(lambda: _refuse(folder, session.rank, obstacle) if is_apart else None)
        is_first = is_apart and places.index(places[session.rank]) == session.rank
        session.run_or_raise_everywhere(lambda: _own_folder(folder) if is_first else None)
        self._lays_out = session.rank == 0 or is_first
        # Only in memory does every process see at once what another process writes.
        is_early = session.rank == 0 and publisher.leave is None and is_in_memory(folder)
        self._is_read_early = session.broadcast(is_early)
        if session.rank == 0:
            mark.unlink()
        self._offers = Offers(publisher.weights, session, self._through, publisher.dtype, self._is_read_early)

    def send(self, version: int) -> tuple[str, PublishAnswer]:
        publisher, folder = self._publisher, self._folder / f"version-{version}"
        if self._lays_out:
            # A failed attempt may have left the folder.
            shutil.rmtree(folder, ignore_errors=True)
        spare, self._spare = self._spare, None
        writing = publisher.weights.begin_files(folder, publisher.dtype, spare, self._is_read_early, self._lays_out)

        def announce() -> Future[PublishAnswer]:
            return publisher.announce(version, fingerprint, FileSource(folder=str(folder)))

        with contextlib.ExitStack() as sending:
            with writing as begun:
                fingerprint = begun.fingerprint
                is_offered = self._offers.put(folder, fingerprint)
                delivery = None if self._hosts is None else sending.enter_context(self._hosts.begin(version, begun))
                if self._is_read_early:
                    told = announce()
                if is_offered:
                    # Engines wait for the probe, and for no file.
                    publisher.prove(version, fingerprint)
                begun.write(None if delivery is None else delivery.note)
            if publisher.leave is not None:
                publisher.prove(version, fingerprint)
                publisher.leave()
            if not self._is_read_early:
                told = announce()
            # Engines load while this rank computes the probe.
            if not is_offered and publisher.leave is None:
                publisher.prove(version, fingerprint)
            if delivery is not None:
                delivery.finish(lambda: told.done() and told.exception() is not None)
        answer = publisher.session.gather_or_raise_everywhere(told.result)[0]
        self._offers.withdraw(folder, publisher.deadline_seconds)
        self._offers.end(answer)
        # A restarted engine loads the current version, so no engine reads the previous one again.
        if self._current != folder:
            self._spare = self._current
        self._current = folder
        return fingerprint, answer

    def close(self) -> None:
        """Remove the run's files."""
        self._publisher.weights.forget_files()
        if self._hosts is not None:
            self._hosts.forget_files()
        if self._lays_out:
            shutil.rmtree(self._folder, ignore_errors=True)


def build(
    settings: Settings, run: str, folder: Path, weights: ModelWeights, session: Session, receiver: RolloutClient | None
) -> FilesTransport:
    publish, hosts = settings.publish, None
    # Only the sidecar itself knows whether one that runs already has other hosts.
    if settings.rollout.hosts is not None or settings.service.endpoint is not None:
        from megatron_rl.trainer.mcore.publish.hosts import Deliveries, HostSettings

        of_hosts = HostSettings(publish.num_streams, publish.lost_host, publish.host_minutes * 60)
        hosts = Deliveries(weights, session, receiver, run, of_hosts, publish.deadline_minutes * 60)
    return FilesTransport(folder, "files" if settings.rollout.takes_turns else publish.through, hosts)


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
