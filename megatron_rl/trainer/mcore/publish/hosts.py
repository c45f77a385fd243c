"""The trainer's half of a publish to engines on hosts that share no folder with it: ranks send what they own.

Rank 0 asks the sidecar for the hosts and begins a version on each (`delivery.control`). Then each rank sends its own
parts from the files that it has written. The engines of a host that is late or lost keep the version that they have
until the next publish, or the run ends, as the settings say.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.hosts import DeliveryHosts
from megatron_rl.shared.weights.delivery.channel import Shipment
from megatron_rl.shared.weights.delivery.control import Control
from megatron_rl.shared.weights.delivery.mapped import MappedFiles, identify
from megatron_rl.shared.weights.delivery.messages import Contents, DeliveryError, File, Hello, Target
from megatron_rl.shared.weights.delivery.sender import HostSender, Supply
from megatron_rl.shared.weights.parcels import describe_contents, list_portions
from megatron_rl.trainer.mcore.model.weights import FilesBegun, ModelWeights
from megatron_rl.trainer.mcore.session import Session

LostHost = Literal["leave", "wait"]
_PATIENCE_SECONDS = 20.0
"""Seconds of silence after which a host that may be left out is lost: longer than a link that is plugged in again."""
_LOOK_SECONDS = 1.0
"""Seconds between two looks at what ranks cannot send."""
_NUM_FOLDERS = 2
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """The way in which hosts get weights."""

    num_streams: int = 4
    """The connections of each rank to each host that it sends to."""
    lost_host: LostHost = "leave"
    """The treatment of a host that is late or lost: left out of the version, or waited for until the run ends."""
    seconds: float = 120.0
    """Seconds until a host that may be left out is late."""


class Deliveries:
    """Brings versions to hosts. Every rank calls each method."""

    def __init__(
        self,
        weights: ModelWeights,
        session: Session,
        directory: RolloutClient | None,
        run: str,
        settings: HostSettings,
        deadline_seconds: float,
    ):
        """Ask rank 0's `directory`, the rollout client, for the hosts."""
        self._weights = weights
        self._session = session
        self._directory = directory
        self._run = run
        self._settings = settings
        self._deadline = deadline_seconds
        self._contents: Contents | None = None
        self._mapped: dict[tuple[tuple[int, int], ...], MappedFiles] = {}

    def find_obstacle(self, without_hosts: str) -> str | None:
        """Say why ranks cannot write into folders of their own hosts; None if all engines are on hosts with agents.

        `without_hosts` is what to do if the sidecar names no hosts.
        """
        found = self._ask()
        if found is None or not found[0].hosts:
            return without_hosts
        if num_own := found[0].num_own_engines:
            return (
                f"The engines of the sidecar's own host, {num_own}, read that folder alone: start an agent there, name "
                "it in the file of --rollout-hosts with these engines, and write --rollout-num-engines 0"
            )
        return None

    def forget_files(self) -> None:
        """Release the files that are kept mapped between publishes."""
        self._mapped.clear()

    @contextlib.contextmanager
    def begin(self, version: int, begun: FilesBegun) -> Iterator["Delivery | None"]:
        """Begin a version on all hosts; None if the sidecar names no hosts. At the end no thread reads the files."""
        session, found = self._session, self._ask()
        if found is None or not found[0].hosts:
            yield None
            return
        hosts, lease = found
        contents = self._describe(begun)
        hello = Hello("control", self._run, lease, version, begun.fingerprint, f"rank {session.rank}")
        shipment = Shipment(hello, hosts.token.encode(), contents, self._settings.num_streams, self._find_patience())
        targets = {host.name: Target(host.name, host.address, host.port) for host in hosts.hosts}
        control = files = None
        if session.rank == 0:
            control = Control(targets.values(), shipment, json.dumps(begun.digests).encode())
        if session.rank in begun.writers:
            supply = Supply(contents, begun.writers.index(session.rank))
            files = self._map(begun.folder, contents.files), supply
        seconds = self._settings.seconds if self._may_leave_out else self._deadline
        delivery = Delivery(session, self._directory, self._may_leave_out, seconds, shipment, targets, control, files)
        try:
            delivery.start()
            yield delivery
        finally:
            delivery.close()

    @property
    def _may_leave_out(self) -> bool:
        return self._settings.lost_host == "leave"

    def _ask(self) -> tuple[DeliveryHosts, int] | None:
        """Ask for the hosts, and for the trainer's lease."""
        directory = self._directory
        return self._session.run_on_first(lambda: None if directory is None else (directory.hosts(), directory.lease))

    def _find_patience(self) -> float:
        return _PATIENCE_SECONDS if self._may_leave_out else self._deadline

    def _describe(self, begun: FilesBegun) -> Contents:
        """Describe what all ranks send; this does not change from version to version."""
        if self._contents is None:
            session, writers = self._session, begun.writers
            own = []
            if session.rank in writers:
                own = list_portions(self._weights.shards, begun.plan, writers.index(session.rank))
            portions = [portion for of_rank in session.gather(own) for portion in of_rank]
            self._contents = describe_contents(begun.plan, len(writers), portions)
        return self._contents

    def _map(self, folder: Path, files: Sequence[File]) -> MappedFiles:
        """Map files, or find them mapped: their folders take turns."""
        name = identify(folder, files)
        mapped = self._mapped.pop(name, None) or MappedFiles(folder, files)
        self._mapped[name] = mapped
        while len(self._mapped) > _NUM_FOLDERS:
            del self._mapped[next(iter(self._mapped))]
        return mapped


@dataclasses.dataclass
class Delivery:
    """The delivery of one version. Every rank calls each method but `note`; rank 0 has directory and control."""

    session: Session
    directory: RolloutClient | None
    may_leave_out: bool
    """True if a host that is late or lost is left out; otherwise the publish fails."""
    seconds: float
    """Seconds until a host is late."""
    shipment: Shipment
    targets: Mapping[str, Target]
    control: Control | None
    files: tuple[MappedFiles, Supply] | None
    """The files that this rank sends, with their supply; None if it writes nothing."""

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.seconds
        self._senders: list[HostSender] = []
        self._told: set[str] = set()

    def start(self) -> None:
        """Wait until hosts have begun, and start to send to them."""

        def await_begun() -> list[str]:
            assert self.control is not None
            self.control.await_begun()
            self._settle()
            return self.control.roots

        self._send_to(self.session.run_on_first(await_begun))

    def note(self, name: str, num_elements: int) -> None:
        """Note elements that this rank has written."""
        if self.files is not None:
            self.files[1].note(name, num_elements)

    def finish(self, is_over: Callable[[], bool]) -> None:
        """Wait until each host holds the version or is left out, or until `is_over`."""

        while (roots := self._finish_round(is_over)) is None or roots:
            if roots:
                self._stop()
                self._send_to(roots)
        self._stop()

    def _finish_round(self, is_over: Callable[[], bool]) -> list[str] | None:
        """Return the hosts that ranks send to in another round; None if this one runs on, an empty list at the end."""
        failures = self.session.gather({sender.host: sender.failure for sender in self._senders if sender.failure})

        def await_round() -> list[str] | None:
            control, left = self.control, self._end - time.monotonic()
            assert control is not None
            reasons = {name: reason for of_rank in failures for name, reason in of_rank.items()}
            for name in reasons.keys() & control.list_open():
                control.give_up(name, reasons[name])
            if not control.await_round(min(left, _LOOK_SECONDS), is_over):
                if left > _LOOK_SECONDS and not is_over():
                    return None
                reason = "the publish has failed" if is_over() else "it did not receive all in time"
                for name in control.list_open():
                    control.give_up(name, f"{name}: {reason}")
            if is_over():
                return []
            self._settle()
            return control.begin_round() if control.list_open() else []

        return self.session.run_on_first(await_round)

    def close(self) -> None:
        """End all that has not ended."""
        if self.control is not None:
            for name in self.control.list_open():
                self.control.give_up(name, "the trainer ended the publish")
            self.control.close()
        self._stop()

    def _send_to(self, names: Sequence[str]) -> None:
        if self.files is not None:
            self._senders = [HostSender(self.targets[name], self.shipment, *self.files) for name in names]

    def _stop(self) -> None:
        for sender in self._senders:
            sender.stop("the delivery is over")
        self._senders = []

    def _settle(self) -> None:
        """Name the hosts that are lost, and have the sidecar leave them out, if they may be."""
        assert self.control is not None and self.directory is not None
        lost = self.control.list_lost()
        new = {name: reason for name, reason in lost.items() if name not in self._told}
        version = self.shipment.hello.version
        if new and not self.may_leave_out:
            raise DeliveryError(
                f"version {version} was not delivered to every host: {'; '.join(new.values())}. Fix or remove these "
                "hosts, or write --publish-lost-host leave"
            )
        for name, reason in new.items():
            _log.warning("version %d is not delivered to %s: %s", version, name, reason)
            self.directory.lose_host(name, version, reason)
        self._told |= set(new)
