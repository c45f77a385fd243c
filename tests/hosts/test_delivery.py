"""Weights between network namespaces: bytes on each link by the kernel's account; links that are cut, slow hosts."""

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_rl.shared.weights.delivery.control import Control
from megatron_rl.shared.weights.delivery.messages import Target
from megatron_rl.shared.weights.files import read_digests
from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.shared.weights.folders import Arrival
from megatron_rl.sidecar.vllm.received import map_file_tensors
from tests.deliveries import TOKEN, Ranks, list_supplies
from tests.hosts.disorder import DELAYED, REPEATED
from tests.hosts.namespaces import Host, network
from tests.unit.test_delivery import begun, must_be_complete
from tests.unit.test_device_files import SMALL, draw_shards

pytestmark = pytest.mark.slow
# 50 MB of weights, in portions of which few are under way at once.
MODEL = dataclasses.replace(SMALL, num_layers=1, hidden_size=1024, ffn_hidden_size=4096)
PORTION_BYTES = 1 << 20


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="megatron-rl-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def ranks(memory: Path) -> Ranks:
    ranks = Ranks(memory / "trainer", MODEL, draw_shards(MODEL, 2), PORTION_BYTES)
    assert ranks.num_bytes > 40e6
    return ranks


class Engines:
    """A host's receiver, and what an engine finds there."""

    def __init__(self, host: Host, folder: Path):
        folder.mkdir(mode=0o700)
        self.host, self.folder = host, folder
        words = [sys.executable, "-m", "tests.hosts.receiver", str(folder), host.address]
        self.process = host.popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{TOKEN}\n".encode())
        self.process.stdin.flush()
        self.target = Target(host.namespace, host.address, int(self.process.stdout.readline()))
        self.before = host.count_bytes()

    def count_bytes(self) -> tuple[int, int]:
        """Count the bytes that this host has received and sent since its receiver started."""
        received, sent = self.host.count_bytes()
        return received - self.before[0], sent - self.before[1]

    def holds(self, ranks: Ranks, version: int) -> bool:
        """Return whether a version is complete here; if so, check it."""
        folder = self.folder / f"version-{version}"
        tensors, digests = map_file_tensors(folder), read_digests(folder)
        with Arrival(folder, ranks.specs) as arrival:
            if not all(map(arrival.wait_for, tensors)):
                return False
        assert digests == ranks.digests
        assert all(digest(tensor).tolist() == digests[name] for name, tensor in tensors.items())
        return True


@contextlib.contextmanager
def started(count: int, memory: Path) -> Iterator[list[Engines]]:
    with network(count) as hosts, contextlib.ExitStack() as stack:
        engines = []
        for number, host in enumerate(hosts):
            one = Engines(host, memory / f"host-{number}")
            stack.callback(one.process.wait)
            stack.callback(one.process.kill)
            engines.append(one)
        yield engines


def list_targets(engines: Sequence[Engines]) -> list[Target]:
    return [one.target for one in engines]


def send(ranks: Ranks, control: Control, engines: Sequence[Engines], streams: int = 2) -> None:
    """Have ranks write, and send to the hosts that the trainer sends to."""
    roots = [one.target for one in engines if one.target.name in control.roots]
    ranks.write(list_supplies(ranks.send(roots, 1, streams=streams)))


@pytest.mark.parametrize("count", [1, 2, 4, 12])
def test_each_link_carries_the_weights_once_and_beyond_eight_hosts_the_trainers_twice(
    count: int, memory: Path, ranks: Ranks
) -> None:
    with started(count, memory) as engines:
        with begun(ranks, list_targets(engines)) as control:
            send(ranks, control, engines)
            must_be_complete(control)
        of_trainer = 0
        for one in engines:
            received, sent = one.count_bytes()
            assert ranks.num_bytes < received <= 1.05 * ranks.num_bytes
            assert sent <= 2 * 1.05 * ranks.num_bytes
            of_trainer += received - (sent if count > 8 else 0)
            assert one.holds(ranks, 1)
        assert of_trainer <= 1.05 * (count if count <= 8 else 2) * ranks.num_bytes


def test_a_link_that_is_cut_for_five_seconds_is_resumed(memory: Path, ranks: Ranks) -> None:
    with started(2, memory) as engines, contextlib.ExitStack() as stack:
        cut, other = engines
        # Both take some seconds.
        for one in engines:
            one.host.shape("tbf rate 100mbit burst 256kbit latency 200ms")
        control = stack.enter_context(begun(ranks, list_targets(engines)))
        ranks.write(list_supplies(ranks.send(list_targets(engines), 1)))
        while cut.count_bytes()[0] < ranks.num_bytes // 4:
            time.sleep(0.02)
        cut.host.set_link(is_up=False)
        time.sleep(5)
        assert not cut.count_bytes()[0] > ranks.num_bytes // 2
        cut.host.set_link(is_up=True)
        must_be_complete(control)
        for one in engines:
            assert one.holds(ranks, 1)
        # Two streams of two ranks may have two portions under way.
        assert cut.count_bytes()[0] <= 1.05 * ranks.num_bytes + 8 * PORTION_BYTES
        assert other.count_bytes()[0] <= 1.05 * ranks.num_bytes


def test_a_slow_host_does_not_hold_up_others_and_is_left_out_by_name(memory: Path, ranks: Ranks) -> None:
    with started(2, memory) as engines, contextlib.ExitStack() as stack:
        slow, fast = engines
        slow.host.shape("tbf rate 20mbit burst 64kbit latency 200ms")
        control = stack.enter_context(begun(ranks, list_targets(engines)))
        send(ranks, control, engines)
        assert fast.holds(ranks, 1)
        assert not control.await_round(0.5)
        assert control.list_open() == [slow.target.name]
        control.give_up(slow.target.name, "it is late")
        assert not slow.holds(ranks, 1)
        assert control.list_lost() == {slow.target.name: "it is late"}


def test_a_receiver_that_is_killed_is_lost_by_name_and_leaves_no_lock(memory: Path, ranks: Ranks) -> None:
    with started(2, memory) as engines, contextlib.ExitStack() as stack:
        killed, other = engines
        for one in engines:
            one.host.shape("tbf rate 200mbit burst 256kbit latency 200ms")
        control = stack.enter_context(begun(ranks, list_targets(engines), patience=2))
        send(ranks, control, engines)
        while killed.count_bytes()[0] < ranks.num_bytes // 4:
            time.sleep(0.02)
        killed.process.kill()
        must_be_complete(control, killed.target.name)
        assert not killed.holds(ranks, 1)
        assert other.holds(ranks, 1)


def test_frames_that_are_repeated_and_overtake_each_other_change_nothing(memory: Path, ranks: Ranks) -> None:
    with (
        started(1, memory) as [engine],
        engine.host.disordered() as end,
        begun(ranks, [engine.target]) as control,
    ):
        start = time.monotonic()
        send(ranks, control, [engine], streams=2)
        must_be_complete(control)
        seconds = time.monotonic() - start
        assert engine.holds(ranks, 1)
        control.close()
        frames, repeated, delayed = end()
        # Each of the kernel's frames has at most 1448 bytes of weights.
        assert frames > ranks.num_bytes / 1448
        assert repeated > REPEATED / 2 * frames
        assert delayed > DELAYED / 2 * frames
        print(f"{ranks.num_bytes / 1e6:.0f} MB in {seconds:.1f} s; {frames} frames, {repeated} twice, {delayed} late")
