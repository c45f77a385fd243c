"""The current version, sent to a host that joins between two publishes by a host that has it; all on the loopback."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.shared.protocol.wire import FileSource, StreamSource, Weights
from megatron_rl.shared.weights import folders
from megatron_rl.shared.weights.delivery.incoming import Incoming
from megatron_rl.shared.weights.delivery.messages import Target
from megatron_rl.shared.weights.delivery.receiver import Receiver
from megatron_rl.shared.weights.files import read_digests, write_digests
from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.shared.weights.folders import COUNTS_FILE, Arrival, Counter
from megatron_rl.sidecar import redelivery
from megatron_rl.sidecar.redelivery import describe_whole, redeliver
from megatron_rl.sidecar.vllm.received import map_file_tensors
from tests.deliveries import TOKEN, Ranks, give_memory, read_tensors
from tests.unit.test_device_files import SMALL, draw_shards

LEASE = 7


memory = pytest.fixture(give_memory)


@pytest.fixture
def ranks(memory: Path) -> Ranks:
    """Return two ranks whose files are written and counted, as after a publish."""
    ranks = Ranks(memory / "version-4", SMALL, draw_shards(SMALL, 2), 1 << 12)
    write_digests(ranks.folder, ranks.digests)
    with folders.writing(ranks.folder, len(ranks.specs), 1), Counter(ranks.folder, ranks.specs, 0, 1) as counter:
        ranks.write([_NotSent()] * 2)
        for spec in ranks.specs:
            counter.add(spec.name, spec.num_elements)
    return ranks


class _NotSent:
    def note(self, name: str, num_elements: int) -> None: ...


@pytest.fixture
def receiver(memory: Path) -> Iterator[Receiver]:
    (memory / "host").mkdir(mode=0o700)
    receiver = Receiver(memory / "host", TOKEN, "127.0.0.1")
    yield receiver
    receiver.close()


def send(
    ranks: Ranks, receiver: Receiver, version: int = 4, lease: int = LEASE, source: StreamSource | None = None
) -> bool:
    of_ranks = FileSource(folder=str(ranks.folder))
    weights = Weights(
        run="run", version=version, fingerprint=ranks.fingerprint, source=source or of_ranks, dtype="float32"
    )
    return redeliver(weights, Target("host", "127.0.0.1", receiver.port), TOKEN.encode(), lease)


def test_a_host_that_joins_gets_every_byte_of_the_version_and_engines_can_follow_its_arrival(ranks, receiver):
    assert send(ranks, receiver)
    folder = receiver.folder / "version-4"
    with Arrival(folder, ranks.specs) as arriving:
        assert all(arriving.wait_for(spec.name) for spec in ranks.specs)
    assert list(read_tensors(folder)) == list(read_tensors(ranks.folder))
    assert read_digests(folder) == ranks.digests
    assert all(digest(tensor).tolist() == ranks.digests[name] for name, tensor in map_file_tensors(folder).items())
    end = time.monotonic() + 60
    while not receiver.describe()["complete"]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_portions_cover_each_file_once_and_end_with_whole_elements(ranks):
    for most_bytes in (7, 100, 1 << 24):
        contents = describe_whole(ranks.folder, most_bytes)
        assert contents is not None
        contents.check()
        assert all(portion.num_bytes <= most_bytes for portion in contents.portions)
        sums = dict.fromkeys(contents.tensors, 0)
        for portion in contents.portions:
            for number, num_elements in portion.elements:
                assert portion.num_bytes == 4 * num_elements
                sums[contents.tensors[number]] += num_elements
        assert sums == {spec.name: spec.num_elements for spec in ranks.specs}


def test_a_part_of_a_version_is_not_sent(ranks, receiver):
    assert not send(ranks, receiver, source=StreamSource(transport="nccl", address="host:1", manifest=[], world_size=2))
    with Counter(ranks.folder, ranks.specs, 0, 1) as counter:
        # Another trainer host holds the rest.
        counter.add(ranks.specs[0].name, 1)
    assert not send(ranks, receiver)
    (ranks.folder / COUNTS_FILE).unlink()
    assert not send(ranks, receiver)
    with folders.writing(ranks.folder, len(ranks.specs), 1):
        assert not send(ranks, receiver)
    assert receiver.describe()["version"] is None


def test_a_host_that_is_not_complete_in_time_is_told_and_nothing_is_sent_any_more(ranks, receiver, monkeypatch, caplog):
    monkeypatch.setattr(redelivery, "_LONGEST_SECONDS", 0.2)
    before = set(threading.enumerate())
    monkeypatch.setattr(Incoming, "_receive", lambda *_, **__: time.sleep(1) or 0)
    assert send(ranks, receiver)
    end = time.monotonic() + 60
    while "version 4 was not sent to host: it did not receive all in time" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    # The host hears of it in a frame of its own, which the warning does not wait for.
    while receiver.describe()["ended"] != "it did not receive all in time":
        assert time.monotonic() < end
        time.sleep(0.01)
    while set(threading.enumerate()) - before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_host_with_a_newer_version_or_trainer_takes_none_of_the_service(ranks, receiver):
    control = ranks.begin([Target("host", "127.0.0.1", receiver.port)], 5)
    with contextlib.closing(control):
        control.await_begun()
        assert not send(ranks, receiver, lease=0)
        assert not send(ranks, receiver, lease=1)
        assert receiver.describe()["version"] == 5
