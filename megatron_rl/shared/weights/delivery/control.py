"""The trainer's control of a delivery, on one rank: which hosts begin a version, and what becomes of it on each.

A host is *complete* when it says so. It is *lost* if it refuses, gives up, or is silent for too long. It is *cut off*
if it gets portions by way of a host that is lost or does not reach it. It also is if it has begun the version from
scratch, which its senders may not know. Then another round brings it the rest by another tree. What it holds already is
not sent again.

Invariants of the way of a version. Each host gets it from one sender, and no host forwards it to more than one. Up to
`_MOST_DIRECT` hosts get it from the trainer; of more than these, two do. So beyond that number the trainer's link
carries the weights twice, and a host's link once in each direction. A host that forwarded to two would take twice as
long as one that receives, however many hosts the trainer has.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from megatron_rl.shared.weights.delivery.channel import Channel, FrameKind, Shipment
from megatron_rl.shared.weights.delivery.messages import Begin, DeliveryError, Refused, Target

_PAUSE_SECONDS = 0.3
_BEGIN_SECONDS = 60.0
"""Seconds to lay out the files of a version, on a host that answers."""


class HostControl:
    """The connection to a host's receiver, which is opened again while the version is not complete there."""

    def __init__(
        self,
        target: Target,
        shipment: Shipment,
        build_begin: Callable[[Sequence[str]], Begin],
        changed: threading.Condition,
    ):
        """Notify `changed` of each change."""
        self.target = target
        self.is_begun = self.is_complete = False
        self.loss: str | None = None
        """The reason why the version will not be complete there."""
        self.unreached: set[str] = set()
        """The hosts that it should forward to and does not reach."""
        self.has_restarted = False
        """True if it has begun the version from scratch in this round, without what it held before."""
        self.children: Sequence[str] = ()
        self._shipment = shipment
        self._build_begin = build_begin
        self._changed = changed
        self._channel: Channel | None = None
        self._number: int | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def is_open(self) -> bool:
        return not self.is_complete and self.loss is None

    def start(self, children: Sequence[str]) -> None:
        """Begin the version."""
        self.children = children
        self._thread.start()

    def begin_again(self, children: Sequence[str]) -> None:
        with self._changed:
            self.children, self.unreached, self.has_restarted = children, set(), False
            channel = self._channel
        if channel is not None:
            channel.end()

    def give_up(self, reason: str) -> None:
        """Tell the host that the version will not be completed."""
        self._lose(reason)
        if (channel := self._channel) is not None:
            # The host ends the version by itself when no sender is connected.
            with contextlib.suppress(DeliveryError):
                channel.send(FrameKind.GIVE_UP, payload=reason.encode())

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            channel = self._channel
            self._changed.notify_all()
        if channel is not None:
            channel.end()

    def _run(self) -> None:
        silent_since: float | None = None
        while not self._is_closed and self.loss is None:
            try:
                self._follow()
            except Refused as refusal:
                self._lose(f"{self.target.name} refuses: {refusal}")
            except (DeliveryError, OSError) as error:
                now = time.monotonic()
                silent_since = now if self._channel is not None or silent_since is None else silent_since
                if now - silent_since > self._shipment.patience:
                    self._lose(f"{self.target.name} was silent for {now - silent_since:.0f} s: {error}")
            finally:
                with self._changed:
                    self._channel = None
                    self._changed.notify_all()
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _PAUSE_SECONDS)

    def _follow(self) -> None:
        channel = self._shipment.connect(self.target, "control")
        with channel.connection:
            with self._changed:
                children = self.children
            begin = self._build_begin(children)
            channel.send(FrameKind.BEGIN, payload=msgspec.msgpack.encode(begin))
            while True:
                frame = channel.receive()
                if frame.kind is FrameKind.REFUSED:
                    raise Refused(frame.payload.decode())
                with self._changed:
                    if frame.kind is FrameKind.BEGUN:
                        self.has_restarted |= self._number not in (None, frame.value)
                        self.is_begun, self._channel, self._number = True, channel, frame.value
                        if self.children is not children:
                            channel.end()
                    elif frame.kind is FrameKind.FINISHED:
                        self.is_complete = self.loss is None
                    elif frame.kind is FrameKind.CUT_OFF:
                        self.unreached.add(frame.payload.decode())
                    self._changed.notify_all()
                if frame.kind is FrameKind.ENDED:
                    self._lose(f"{self.target.name} gave up: {frame.payload.decode()}")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self.is_open:
                self.loss = reason
            self._changed.notify_all()


class Control:
    """The delivery of one version to all hosts."""

    def __init__(self, targets: Iterable[Target], shipment: Shipment, digests: bytes):
        """Begin the version on all hosts, side by side."""
        self._shipment = shipment
        self._digests = digests
        self._begin_seconds = shipment.patience + _BEGIN_SECONDS
        self._changed = threading.Condition()
        self._hosts = {
            target.name: HostControl(target, shipment, self._build_begin, self._changed) for target in targets
        }
        self.roots, self._children = plan_tree(list(self._hosts))
        for name, host in self._hosts.items():
            host.start(self._children[name])

    def await_begun(self) -> None:
        """Wait until each host has begun the version or is lost."""
        waiting = list(self._hosts.values())
        with self._changed:
            self._changed.wait_for(lambda: all(host.is_begun or host.loss for host in waiting), self._begin_seconds)
        for host in waiting:
            if not (host.is_begun or host.loss):
                host.give_up(f"{host.target.name} did not begin within {self._begin_seconds:g} s")

    def await_round(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until each host is complete, lost or cut off; return False if some are not in time."""
        end = time.monotonic() + seconds
        with self._changed:
            while any(self._is_awaited()):
                if is_over() or (left := end - time.monotonic()) <= 0:
                    return False
                self._changed.wait(min(left, 0.2))
        return True

    def begin_round(self) -> list[str]:
        """Begin another round for the hosts that are cut off; return those that the trainer sends to."""
        remaining = [name for name, host in self._hosts.items() if host.is_open]
        self.roots, children = plan_tree(remaining)
        self._children = {name: [] for name in self._hosts} | children
        for name in remaining:
            self._hosts[name].begin_again(self._children[name])
        return self.roots

    def give_up(self, name: str, reason: str) -> None:
        self._hosts[name].give_up(reason)

    def list_open(self) -> list[str]:
        """List the hosts that may still become complete."""
        return [name for name, host in self._hosts.items() if host.is_open]

    def list_lost(self) -> dict[str, str]:
        """Return the hosts that are lost, each with the reason."""
        return {name: host.loss for name, host in self._hosts.items() if host.loss is not None}

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()

    def _is_awaited(self) -> Iterable[bool]:
        cut_off: set[str] = set()
        for name, host in self._hosts.items():
            # A host that was to forward in an earlier round cuts off no other one in this one.
            is_gone = host.loss is not None or host.has_restarted
            gone = {name} if is_gone else host.unreached.intersection(self._children[name])
            for one in gone:
                cut_off |= {one, *list_below(one, self._children)}
        return (host.is_open and name not in cut_off for name, host in self._hosts.items())

    def _build_begin(self, children: Sequence[str]) -> Begin:
        targets = tuple(self._hosts[name].target for name in children)
        return Begin(self._digests, targets, self._shipment.num_streams, self._shipment.contents)


_MOST_DIRECT = 8
_NUM_CHAINS = 2


def plan_tree(names: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the hosts that the trainer sends to, and those that each host forwards to."""
    if len(names) <= _MOST_DIRECT:
        return list(names), {name: [] for name in names}
    children = {name: list(names[place + _NUM_CHAINS : place + _NUM_CHAINS + 1]) for place, name in enumerate(names)}
    return list(names[:_NUM_CHAINS]), children


def list_below(name: str, children: dict[str, list[str]]) -> list[str]:
    """List all hosts that get a version by way of this one."""
    return [one for child in children[name] for one in (child, *list_below(child, children))]
