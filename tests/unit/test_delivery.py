"""Weights that are sent to hosts over TCP arrive as they are, once, or the host is named."""

import contextlib
import dataclasses
import socket
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.shared.weights.delivery import incoming
from megatron_rl.shared.weights.delivery.channel import Broken, Channel, Frame, FrameKind
from megatron_rl.shared.weights.delivery.control import Control, list_below, plan_tree
from megatron_rl.shared.weights.delivery.greetings import shut
from megatron_rl.shared.weights.delivery.messages import PROTOCOL, Contents, File, Portion, Refused, Strip, Target
from megatron_rl.shared.weights.delivery.receiver import Receiver
from megatron_rl.shared.weights.delivery.sender import HostSender, Supply
from megatron_rl.shared.weights.files import read_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.folders import Arrival, is_being_written
from megatron_rl.sidecar.vllm.received import map_file_tensors
from tests.deliveries import TOKEN, Ranks, list_supplies, read_tensors
from tests.unit.test_device_files import MIXED, SMALL, draw_shards

pytestmark = pytest.mark.each_change
SOON = 120.0
"""Seconds that no test reaches."""


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="megatron-rl-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@contextlib.contextmanager
def receiving(folder: Path, count: int, token: str = TOKEN, silent: float = SOON) -> Iterator[list[Receiver]]:
    receivers = []
    for number in range(count):
        own = folder / f"host-{number}"
        own.mkdir(mode=0o700)
        receivers.append(Receiver(own, token, "127.0.0.1", silent_seconds=silent))
    try:
        yield receivers
    finally:
        for receiver in receivers:
            receiver.close()


def list_targets(receivers: list[Receiver]) -> list[Target]:
    return [Target(f"host-{number}", "127.0.0.1", one.port) for number, one in enumerate(receivers)]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Relay:
    """A port that passes bytes on to a receiver, and counts or changes those that senders send."""

    def __init__(self, port: int, change: Callable[[bytearray, int], bytearray | None] = lambda data, _: data):
        """Pass on `change` of the bytes and of the number of bytes before them; None cuts the connection."""
        self.num_bytes = self.num_connections = 0
        self._is_cut = False
        self._ends: list[socket.socket] = []
        self._port, self._change, self._lock = port, change, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            sender, _ = self._listener.accept()
            if self._is_cut:
                sender.close()
                continue
            self.num_connections += 1
            receiver = socket.create_connection(("127.0.0.1", self._port))
            self._ends += [sender, receiver]
            for pair in ((sender, receiver, True), (receiver, sender, False)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def cut(self) -> None:
        """End all connections, and pass on none until `mend`."""
        self._is_cut = True
        for end in self._ends:
            shut(end)

    def mend(self) -> None:
        self._is_cut = False

    def _pass(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if is_counted:
                    with self._lock:
                        before, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
                    changed = self._change(data, before)
                    if changed is None:
                        break
                    data = changed
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def begun(ranks: Ranks, targets: list[Target], version: int = 1, **options: Any) -> Iterator[Control]:
    """Begin a version on hosts, and end the connections afterwards."""
    with contextlib.closing(ranks.begin(targets, version, **options)) as control:
        control.await_begun()
        yield control


def must_be_complete(control: Control, *lost: str) -> None:
    """Wait until all hosts are complete but those that are lost."""
    assert control.await_round(SOON), control.list_lost()
    assert (control.list_open(), list(control.list_lost())) == ([], [*lost]), control.list_lost()


def send_again(ranks: Ranks, targets: list[Target], **options: Any) -> list[tuple[Supply, HostSender]]:
    """Send in another round what the ranks have written in the first one."""
    started = ranks.send(targets, 1, **options)
    for supply in list_supplies(started):
        supply.add(supply.numbers)
    return started


def deliver(ranks: Ranks, version: int, targets: list[Target], roots: list[Target] | None = None) -> None:
    """Deliver a version and wait until all hosts are complete."""
    with begun(ranks, targets, version) as control:
        started = ranks.send(targets if roots is None else roots, version)
        ranks.write(list_supplies(started))
        must_be_complete(control)
        assert all(sender.wait(SOON) and sender.failure is None for _, sender in started)


def read_as_engine(ranks: Ranks, folder: Path) -> None:
    """Check that what a host holds is what was published."""
    assert (folder.stat().st_mode & 0o777, is_being_written(folder)) == (0o700, False)
    tensors = map_file_tensors(folder)
    assert compute_fingerprint(ranks.specs, read_digests(folder)) == ranks.fingerprint
    with Arrival(folder, ranks.specs) as arrival:
        assert all(arrival.wait_for(name) for name in tensors)
    for name, tensor in tensors.items():
        assert digest(tensor).tolist() == read_digests(folder)[name], name


@pytest.mark.parametrize(("architecture", "size", "most_bytes"), [(SMALL, 2, 5000), (MIXED, 1, 1 << 20)])
def test_each_host_gets_every_byte_once_from_the_ranks_that_own_it(
    memory: Path, architecture: object, size: int, most_bytes: int
) -> None:
    dtyped = dataclasses.replace(architecture, dtype="bfloat16")  # type: ignore[type-var]
    ranks = Ranks(memory / "trainer", dtyped, draw_shards(dtyped, size, torch.bfloat16), most_bytes)
    with receiving(memory, 2) as receivers:
        relays = [Relay(receiver.port) for receiver in receivers]
        targets = [Target(f"host-{number}", "127.0.0.1", relay.port) for number, relay in enumerate(relays)]
        deliver(ranks, 3, list_targets(receivers), targets)
        for receiver, relay in zip(receivers, relays, strict=True):
            described = {"version": 3, "fingerprint": ranks.fingerprint, "complete": True, "ended": None}
            assert receiver.describe() == described
            read_as_engine(ranks, receiver.folder / "version-3")
            # Beside each portion travel two frames and their codes.
            extra = 100 * len(ranks.contents.portions) + 1000 * relay.num_connections
            assert ranks.num_bytes <= relay.num_bytes <= ranks.num_bytes + extra
        assert list(read_tensors(receivers[0].folder / "version-3")) == list(read_tensors(ranks.folder))


@pytest.fixture
def ranks(memory: Path) -> Ranks:
    return Ranks(memory / "trainer", SMALL, draw_shards(SMALL, 2), 5000)


def test_a_broken_connection_resumes_after_the_portions_that_arrived(memory: Path, ranks: Ranks) -> None:
    def break_twice(data: bytearray, before: int) -> bytearray | None:
        places = [place for place in places_of_breaks if before < place <= before + len(data)]
        broken.extend(places)
        return None if places else data

    places_of_breaks, broken = (ranks.num_bytes // 4, ranks.num_bytes // 2), list[int]()
    with receiving(memory, 1) as [receiver]:
        relay = Relay(receiver.port, break_twice)
        deliver(ranks, 1, list_targets([receiver]), [Target("host-0", "127.0.0.1", relay.port)])
        read_as_engine(ranks, receiver.folder / "version-1")
        assert sorted(broken) == [*places_of_breaks]
        # A stream has at most two portions under way.
        largest = max(portion.num_bytes for portion in ranks.contents.portions)
        records = 100 * len(ranks.contents.portions) + 1000 * relay.num_connections
        assert relay.num_bytes <= ranks.num_bytes + records + 2 * 2 * largest
        # Ranks that begin again learn that nothing is missing.
        before = relay.num_bytes
        again = send_again(ranks, [Target("host-0", "127.0.0.1", relay.port)])
        assert all(sender.wait(SOON) for _, sender in again)
        assert relay.num_bytes < before + 10_000 < before + ranks.num_bytes // 4


def test_portions_that_arrive_corrupted_are_sent_again_and_never_counted(memory: Path, ranks: Ranks) -> None:
    changed: list[int] = []

    def change(data: bytearray, before: int) -> bytearray:
        if before // 40_000 != (before + len(data)) // 40_000:
            changed.append(before)
            data[len(data) // 2] ^= 0x10
        return data

    with receiving(memory, 1) as [receiver]:
        relay = Relay(receiver.port, change)
        deliver(ranks, 1, list_targets([receiver]), [Target("host-0", "127.0.0.1", relay.port)])
        assert changed
        read_as_engine(ranks, receiver.folder / "version-1")
        assert list(read_tensors(receiver.folder / "version-1")) == list(read_tensors(ranks.folder))


BITS_OF_CRC_32 = "100000100110000010001110110110111"
# Bytes that differ by this pattern have the same CRC-32: an error of the network does not look so, a forgery may.
SAME_CRC_32 = int(BITS_OF_CRC_32[::-1], 2).to_bytes(5, "little")


@pytest.mark.parametrize("pattern", [b"\x01", SAME_CRC_32])
def test_a_host_that_always_gets_changed_bytes_is_named_and_its_lock_released(memory: Path, pattern: bytes) -> None:
    assert zlib.crc32(SAME_CRC_32) == zlib.crc32(bytes(5))
    # Whole rows of the embedding fill a portion, so a byte in the middle of 64 KiB is one of weights.
    wide = dataclasses.replace(SMALL, hidden_size=2048)
    ranks = Ranks(memory / "trainer", wide, draw_shards(wide), 1 << 20)

    def change(data: bytearray, _: int) -> bytearray:
        if len(data) == 1 << 16:
            for place, bits in enumerate(pattern, 1 << 15):
                data[place] ^= bits
        return data

    with receiving(memory, 1) as [receiver], begun(ranks, list_targets([receiver])) as control:
        relay = Relay(receiver.port, change)
        started = ranks.send([Target("host-0", "127.0.0.1", relay.port)], 1)
        ranks.write(list_supplies(started))
        assert control.await_round(SOON)
        assert "safetensors arrived corrupted 5 times from 127.0.0.1" in control.list_lost()["host-0"]
        assert all(sender.wait(SOON) for _, sender in started)
        folder = receiver.folder / "version-1"
        with Arrival(folder, ranks.specs) as arrival:
            assert not arrival.is_coming()


def test_a_wrong_token_and_a_stale_trainer_are_refused_by_name(memory: Path, ranks: Ranks) -> None:
    with receiving(memory, 1) as [receiver]:
        targets = list_targets([receiver])
        deliver(ranks, 4, targets)
        with begun(ranks, targets, 3) as stale:
            assert "version 3 of run under lease 1 is older than this host's, version 4" in stale.list_lost()["host-0"]
        for version, lease in ((3, 1), (4, 0)):
            [(_, sender), *_] = ranks.send(targets, version, lease=lease)
            assert sender.wait(SOON)
            assert sender.failure is not None
            assert f"refuses weights of rank 0: version {version} of run under lease {lease}" in sender.failure
        read_as_engine(ranks, receiver.folder / "version-4")
    (memory / "other").mkdir()
    with (
        receiving(memory / "other", 1, token="another token") as [receiver],
        begun(ranks, list_targets([receiver])) as control,
    ):
        assert control.list_lost() == {"host-0": "host-0 refuses: the token is wrong"}
        assert list(receiver.folder.iterdir()) == []


def test_a_host_that_dies_is_lost_and_the_others_are_complete(memory: Path, ranks: Ranks) -> None:
    with receiving(memory, 2) as receivers, begun(ranks, list_targets(receivers), patience=0.5) as control:
        receivers[1].close()
        ranks.write(list_supplies(ranks.send(list_targets(receivers), 1, patience=0.5)))
        must_be_complete(control, "host-1")
        assert "host-1 was silent for" in control.list_lost()["host-1"]
        read_as_engine(ranks, receivers[0].folder / "version-1")


def test_engines_stop_waiting_when_the_trainer_has_gone(memory: Path, ranks: Ranks) -> None:
    with receiving(memory, 1, silent=0.3) as [receiver], begun(ranks, list_targets([receiver])) as control:
        folder = receiver.folder / "version-1"
        with Arrival(folder, ranks.specs) as arrival:
            assert arrival.is_coming()
            control.close()
            assert not arrival.wait_for(ranks.specs[0].name)
        assert "no sender was connected" in receiver.describe()["ended"]


@pytest.mark.parametrize("is_all_sent", [True, False])
def test_a_host_that_begins_a_version_from_scratch_gets_all_of_it(
    memory: Path, ranks: Ranks, is_all_sent: bool
) -> None:
    """Cut the link until the host ends the version, once a rank has sent its part, or all of that but a portion."""
    ranks.write([Supply(ranks.contents, writer) for writer in range(2)])
    with receiving(memory, 1, silent=0.3) as [receiver], contextlib.ExitStack() as stack:
        relay = Relay(receiver.port)
        target = Target("host-0", "127.0.0.1", relay.port)
        control = stack.enter_context(begun(ranks, [target]))
        started = ranks.send([target], 1)
        first, second = list_supplies(started)
        sent = first.numbers if is_all_sent else first.numbers[:-1]
        first.add(sent)
        wait_for(lambda: relay.num_bytes > sum(ranks.contents.portions[number].num_bytes for number in sent))
        if is_all_sent:
            assert started[0][1].wait(SOON)
        relay.cut()
        wait_for(lambda: receiver.describe().get("ended"))
        relay.mend()
        # It has begun from scratch.
        wait_for(lambda: receiver.describe().get("ended", "") is None)
        first.add(first.numbers[len(sent) :])
        second.add(second.numbers)
        if is_all_sent:
            assert control.await_round(SOON)
            assert control.begin_round() == ["host-0"]
            started += send_again(ranks, [target])
        else:
            wait_for(lambda: receiver.describe()["complete"])
        assert control.await_round(SOON)
        wait_for(lambda: not control.list_open())
        assert control.list_lost() == {}
        assert [sender.failure for _, sender in started] == [None] * len(started)
        for _, sender in started:
            sender.stop("the test is over")
        read_as_engine(ranks, receiver.folder / "version-1")


def test_engines_stop_waiting_when_the_trainer_gives_a_host_up(memory: Path, ranks: Ranks) -> None:
    with receiving(memory, 1) as [receiver], begun(ranks, list_targets([receiver])) as control:
        assert not control.await_round(0.01)
        control.give_up("host-0", "host-0 is late")
        with Arrival(receiver.folder / "version-1", ranks.specs) as arrival:
            assert not arrival.wait_for(ranks.specs[0].name)
        assert control.list_lost() == {"host-0": "host-0 is late"}
        assert receiver.describe()["ended"] == "host-0 is late"
        # The next publish may be of the same version.
        deliver(ranks, 1, list_targets([receiver]))
        read_as_engine(ranks, receiver.folder / "version-1")


def test_versions_take_turns_in_two_sets_of_files_and_the_last_whole_one_is_kept(memory: Path, ranks: Ranks) -> None:
    with receiving(memory, 1) as [receiver]:
        numbers = []
        for version in range(4):
            deliver(ranks, version, list_targets([receiver]))
            folder = receiver.folder / f"version-{version}"
            read_as_engine(ranks, folder)
            numbers.append([path.stat().st_ino for path in sorted(folder.glob("*.safetensors"))])
            names = {path.name for path in receiver.folder.iterdir()}
            assert names == {f"version-{one}" for one in (version - 1, version) if one >= 0}
        assert numbers[2:] == numbers[:2] != numbers[1:3]


def test_beyond_eight_hosts_the_trainer_sends_the_weights_twice_and_each_host_gets_them_once(memory: Path) -> None:
    ranks = Ranks(memory / "trainer", SMALL, draw_shards(SMALL), 1 << 15)
    with receiving(memory, 12) as receivers:
        relays = [Relay(receiver.port) for receiver in receivers]
        targets = [Target(f"host-{number}", "127.0.0.1", relay.port) for number, relay in enumerate(relays)]
        with begun(ranks, targets, streams=1) as control:
            assert control.roots == ["host-0", "host-1"]
            ranks.write(list_supplies(ranks.send(targets[:2], 1, streams=1)))
            must_be_complete(control)
        for receiver, relay in zip(receivers, relays, strict=True):
            assert list(read_tensors(receiver.folder / "version-1")) == list(read_tensors(ranks.folder))
            # Beside the weights: the description of the version, and the frames.
            assert ranks.num_bytes <= relay.num_bytes <= ranks.num_bytes + 20_000


def test_hosts_below_one_that_dies_get_the_rest_in_another_round(memory: Path) -> None:
    ranks = Ranks(memory / "trainer", SMALL, draw_shards(SMALL), 5000)
    with (
        receiving(memory, 9) as receivers,
        begun(ranks, targets := list_targets(receivers), patience=0.5, streams=1) as control,
    ):
        receivers[0].close()
        ranks.write(list_supplies(ranks.send(targets[:2], 1, patience=0.5, streams=1)))
        assert control.await_round(SOON)
        assert list(control.list_lost()) == ["host-0"]
        below = control.list_open()
        assert below == ["host-2", "host-4", "host-6", "host-8"]
        roots = control.begin_round()
        send_again(ranks, [target for target in targets if target.name in roots], streams=1)
        must_be_complete(control, "host-0")
        for receiver in receivers[1:]:
            read_as_engine(ranks, receiver.folder / "version-1")


def test_a_host_that_its_parent_does_not_reach_gets_the_weights_from_the_trainer_and_is_waited_for(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "_CHILD_PATIENCE_SECONDS", 0.3)
    ranks, is_open = Ranks(memory / "trainer", SMALL, draw_shards(SMALL), 5000), threading.Event()

    def cut_streams(data: bytearray, before: int) -> bytearray | None:
        return data if is_open.is_set() or b"stream" not in data[:200] else None

    with receiving(memory, 9) as receivers, contextlib.ExitStack() as stack:
        targets = list_targets(receivers)
        targets[2] = Target("host-2", "127.0.0.1", Relay(receivers[2].port, cut_streams).port)
        control = stack.enter_context(begun(ranks, targets, streams=1))
        ranks.write(list_supplies(ranks.send(targets[:2], 1, streams=1)))
        assert control.await_round(SOON)
        assert (control.list_open(), control.list_lost()) == (["host-2", "host-4", "host-6", "host-8"], {})
        roots = control.begin_round()
        # Nothing has come yet, and no host is cut off from the trainer.
        assert not control.await_round(0.5)
        is_open.set()
        send_again(ranks, [target for target in targets if target.name in roots], streams=1)
        must_be_complete(control)
        for receiver in receivers:
            read_as_engine(ranks, receiver.folder / "version-1")


def test_what_a_host_did_not_reach_in_one_round_is_waited_for_in_the_next(ranks: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        targets = [Target(f"host-{number}", "127.0.0.1", silent.getsockname()[1]) for number in range(10)]
        control = ranks.begin(targets, 1)
        control._hosts["host-0"].unreached.add("host-2")
        below = ["host-2", "host-4", "host-6", "host-8"]
        assert list(control._is_awaited()) == [target.name not in below for target in targets]
        control.begin_round()
        assert all(control._is_awaited())
        control.close()


def test_a_tree_reaches_each_host_once_and_no_host_forwards_to_more_than_one() -> None:
    for count in (0, 1, 8, 9, 12, 100):
        names = [str(number) for number in range(count)]
        roots, children = plan_tree(names)
        assert len(roots) == (count if count <= 8 else 2)
        assert sorted([*roots, *(below for root in roots for below in list_below(root, children))]) == sorted(names)
        assert max((len(own) for own in children.values()), default=0) <= 1


@pytest.mark.parametrize(
    ("name", "portion", "message"),
    [
        ("../x.safetensors", Portion(0, 0, (Strip(8, 1, 16, 16),), ((0, 4),)), "must be the plain name"),
        ("x.safetensors", Portion(0, 0, (Strip(8, 1, 12, 12),), ((0, 3),)), "cover byte 20 of .* not at all"),
        ("x.safetensors", Portion(0, 0, (Strip(12, 1, 12, 12),), ((0, 3),)), "cover byte 8 of .* not at all"),
        ("x.safetensors", Portion(0, 0, (Strip(8, 1, 16, 16), Strip(12, 1, 4, 4)), ((0, 5),)), "byte 12 .* twice"),
        # Two equal parts and a gap have as many bytes as the file needs.
        ("x.safetensors", Portion(0, 0, (Strip(8, 1, 8, 8),) * 2, ((0, 4),)), "cover byte 8 of x.safetensors twice"),
        ("x.safetensors", Portion(0, 0, (Strip(4, 1, 16, 16),), ((0, 4),)), "lies outside"),
        ("x.safetensors", Portion(0, 0, (Strip(8, 2, 8, 16),), ((0, 4),)), "lies outside"),
        ("x.safetensors", Portion(1, 0, (Strip(8, 1, 16, 16),), ((0, 4),)), "names a file or a rank"),
        ("x.safetensors", Portion(0, 0, (Strip(8, 1, 16, 16),), ((1, 4),)), "names a tensor"),
    ],
)
def test_a_description_that_does_not_cover_its_files_is_refused(name: str, portion: Portion, message: str) -> None:
    contents = Contents((File(name, 24, bytes(8)),), ("a",), 1, (portion,))
    with pytest.raises(Refused, match=message):
        contents.check()


def test_a_receiver_that_does_not_know_the_token_gets_nothing_from_a_sender(ranks: Ranks) -> None:
    heard = bytearray()

    def pretend(listener: socket.socket) -> None:
        # Whatever a sender proves is accepted.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.sendall(struct.pack("<10sH32s", b"mrlweights", PROTOCOL, bytes(32)))
                connection.recv(1 << 16)
                connection.sendall(bytes(33))
                heard.extend(connection.recv(1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=pretend, args=(listener,), daemon=True).start()
        with begun(ranks, [Target("host-0", "127.0.0.1", listener.getsockname()[1])]) as control:
            assert "host-0 refuses: the receiver does not know the token" in control.list_lost()["host-0"]
        assert not heard
        shut(listener)


def take_frames(key: bytes, data: bytes, count: int) -> list[Frame]:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(data)
        sender.shutdown(socket.SHUT_WR)
        channel = Channel(receiver, key, is_sender=False)
        return [channel.receive() for _ in range(count)]


def test_frames_that_are_changed_repeated_reordered_or_sent_back_end_the_connection() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        channel = Channel(sender, bytes(32), is_sender=True)
        for number in range(2):
            channel.send(FrameKind.CUT_OFF, number, b"payload")
        data = receiver.recv(1 << 16)
    first, second = data[: len(data) // 2], data[len(data) // 2 :]
    frames = [Frame(FrameKind.CUT_OFF, number, b"payload") for number in range(2)]
    assert take_frames(bytes(32), data, 2) == frames
    flipped = [first[:place] + bytes([first[place] ^ 1]) + first[place + 1 :] for place in range(len(first))]
    for changed in (*flipped, first + first, second + first):
        with pytest.raises(Broken):
            take_frames(bytes(32), changed, 2)
    with pytest.raises(Broken):
        take_frames(bytes([1]) * 32, data, 1)
    back, end = socket.socketpair()
    with back, end:
        back.sendall(data)
        with pytest.raises(Broken):
            Channel(end, bytes(32), is_sender=True).receive()
