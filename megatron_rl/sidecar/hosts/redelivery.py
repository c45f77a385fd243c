"""Brings the current version to a host that joins or returns between two publishes, from a host that has all of it.

The trainer is busy then. If all of the version lies in the folder that rank 0 has published to, and this is the
service's host, the service sends it as a rank would (docs/hosts.md). Otherwise it has the agent of a host of engines
do so, from the folder in which the version has arrived. A version that the trainer begins on the host takes its place.
Engines prove what they load in the usual way.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.shared.weights.delivery.control import Control
from megatron_rl.shared.weights.delivery.mapped import MappedFiles
from megatron_rl.shared.weights.delivery.messages import Contents, Hello, Target
from megatron_rl.shared.weights.delivery.sender import HostSender
from megatron_rl.shared.weights.delivery.supply import Supply
from megatron_rl.shared.weights.delivery.whole import describe_whole
from megatron_rl.shared.weights.laid_out import DIGESTS_FILE

_log = logging.getLogger(__name__)

_SENDER = "a host that has the version"
_NUM_STREAMS = 2
_PATIENCE_SECONDS = 20.0
_LONGEST_SECONDS = 600.0


class Redelivery:
    """The delivery of one version to one host, from threads of its own."""

    def __init__(self, weights: Weights, contents: Contents, target: Target, key: bytes, lease: int) -> None:
        """Begin the version on the host; `lease` is that of the trainer that has published it."""
        self._weights = weights
        self._target = target
        folder = Path(weights.location)
        hello = Hello("control", weights.run, lease, weights.version, weights.fingerprint, _SENDER)
        of_stream = Hello("stream", weights.run, lease, weights.version, weights.fingerprint, _SENDER)
        mapped, supply = MappedFiles(folder, contents.files), Supply(contents)
        digests = (folder / DIGESTS_FILE).read_bytes()
        self._control = Control([target], key, hello, digests, contents, _NUM_STREAMS, _PATIENCE_SECONDS)
        supply.add(supply.numbers)

        def send() -> HostSender:
            return HostSender(target, key, of_stream, contents, mapped, supply, _NUM_STREAMS, _PATIENCE_SECONDS)

        self._send: Callable[[], HostSender] = send

    def begin(self) -> bool:
        """Wait until the host has begun the version; return whether it arrives there now."""
        self._control.await_begun()
        if not self._control.list_open():
            self._end()
            return False
        threading.Thread(target=self._finish, daemon=True).start()
        return True

    def _finish(self) -> None:
        sender = self._send()
        if not self._control.await_round(_LONGEST_SECONDS) or self._control.list_open():
            self._control.give_up(self._target.name, "it did not receive all in time")
        sender.stop("the delivery is over")
        self._end()

    def _end(self) -> None:
        if reason := self._control.list_lost().get(self._target.name):
            _log.warning("version %d was not sent to %s: %s", self._weights.version, self._target.name, reason)
        self._control.close()


def redeliver(weights: Weights, target: Target, key: bytes, lease: int) -> bool:
    """Begin to send a version to a host; return whether it arrives there now."""
    if weights.transport != "shm":
        return False
    contents = describe_whole(Path(weights.location))
    return contents is not None and Redelivery(weights, contents, target, key, lease).begin()
