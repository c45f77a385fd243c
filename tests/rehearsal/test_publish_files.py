"""Publishes through files from an emulated device: the bytes that move, the waits, the launches, and planted faults."""

import contextlib
import dataclasses
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.shared.weights import device_export
from megatron_rl.shared.weights.device_export import DeviceExport
from megatron_rl.shared.weights.files import read_digests
from megatron_rl.shared.weights.fingerprint import compute_fingerprint, digest
from megatron_rl.shared.weights.folders import Arrival
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm.received import map_file_tensors
from megatron_rl.trainer.mcore.publish.files import FilesTransport
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks
from tests.rehearsal import device
from tests.rehearsal.kernels import kernels_run
from tests.rehearsal.platform import RehearsedPlatform
from tests.rehearsal.streams import DeviceFault, Event, Stream, state

pytestmark = pytest.mark.each_change

PARCEL_BYTES = 100_000


@dataclasses.dataclass
class Seen:
    """The work of one publish."""

    fetched: list[device.Fetched]
    num_waits: int
    """Waits of the host for the device."""
    launched: list[str]
    num_bytes: int
    """The bytes of the weights."""
    num_tensors: int

    @property
    def num_pinned(self) -> int:
        return sum(copy.num_bytes for copy in self.fetched if copy.is_pinned)

    @property
    def num_pageable(self) -> int:
        return sum(copy.num_bytes for copy in self.fetched if not copy.is_pinned)


class Reader:
    """An engine that reads each tensor as it arrives, and compares all digests."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.num_bytes = self.num_tensors = 0
        self.is_done = threading.Event()

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        folder = Path(weights.folder)
        tensors, digests = map_file_tensors(folder), read_digests(folder)
        specs = [TensorSpec(name, tuple(tensor.shape), weights.dtype) for name, tensor in tensors.items()]
        assert compute_fingerprint(specs, digests) == weights.fingerprint
        assert digests.keys() == tensors.keys()
        with Arrival(folder, specs) as arrival:
            self.wrong = [
                name
                for name, tensor in tensors.items()
                if not arrival.wait_for(name) or digest(tensor).tolist() != digests[name]
            ]
        self.num_bytes, self.num_tensors = sum(tensor.nbytes for tensor in tensors.values()), len(tensors)
        self.is_done.set()
        return PublishAnswer()

    def probed(self, answer: Any) -> None:
        raise AssertionError("no probe was given")


@contextlib.contextmanager
def waits_counted() -> Iterator[list[str]]:
    """Note the waits for events and streams; an operation that the host waits for waits for its stream."""
    found: list[str] = []

    def noting(kind: type) -> Callable[[Any], None]:
        true = kind.synchronize

        def synchronize(self: Any) -> None:
            found.append(kind.__name__)
            true(self)

        return synchronize

    with contextlib.ExitStack() as stack:
        for kind in (Event, Stream):
            stack.enter_context(mock.patch.object(kind, "synchronize", noting(kind)))
        yield found


def _counted_before_arrival() -> AbstractContextManager:
    true = DeviceExport._finish

    def finish(self: DeviceExport, sent: Any, count: Any) -> None:
        true(self, sent._replace(done=mock.Mock()), count)

    return mock.patch.object(DeviceExport, "_finish", finish)


def _stale_slice() -> AbstractContextManager:
    """Pack a parameter from where it was at the publish before."""
    true = DeviceExport._get_packers
    return mock.patch.object(DeviceExport, "_get_packers", lambda self: self._packers or true(self))


def _one_buffer() -> AbstractContextManager:
    return mock.patch.object(device_export, "_NUM_BUFFERS", 1)


def _copy_before_packing() -> AbstractContextManager:
    return mock.patch.object(Stream, "wait_event")


def _locking_refused() -> AbstractContextManager:
    return mock.patch.object(RehearsedPlatform, "page_lock", return_value="not permitted")


PLANTS = {
    "counted before it has arrived": _counted_before_arrival,
    "a stale slice": _stale_slice,
    "one buffer": _one_buffer,
    "copied before it is packed": _copy_before_packing,
    "locking refused": _locking_refused,
}


def publish(
    case: str, model: Path, folder: Path, dtype: str | None, parcel_bytes: int | None, plant: str | None
) -> tuple[list[Seen], list[list[str]], list[str]]:
    """Publish three versions; return what each did, the tensors that arrived with other numbers, and faults."""
    seen: list[Seen] = []
    wrong: list[list[str]] = []
    reader = Reader()
    # Memory that parameters have left keeps its numbers.
    moved: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(start_session(CASES[case]))
        if parcel_bytes is not None:
            small = functools.partialmethod(DeviceExport.__init__, most_bytes=parcel_bytes)
            stack.enter_context(mock.patch.object(DeviceExport, "__init__", small))
        if plant is not None:
            stack.enter_context(PLANTS[plant]())
        launched = stack.enter_context(kernels_run())
        waited = stack.enter_context(waits_counted())
        weights = build(session, CASES[case], model).weights
        receiver = reader if session.rank == 0 else None
        publisher = Publisher(weights, session, receiver, "run", FilesTransport(folder / "run"), dtype)
        try:
            for version in range(3):
                for found in (device.fetched, launched, waited):
                    found.clear()
                publisher.publish(version)
                copies, num_waits = list(device.fetched), len(waited)
                seen.append(Seen(copies, num_waits, list(launched), reader.num_bytes, reader.num_tensors))
                wrong.append(reader.wrong)
                with torch.no_grad():
                    for shard in weights.shards:
                        if plant == "a stale slice":
                            moved.append(shard.parameter.data)
                            shard.parameter.data = shard.parameter.data * 1.5
                        else:
                            shard.parameter.mul_(1.5)
        except DeviceFault:
            # It is among the device's faults.
            reader.is_done.wait(60)
        publisher.close()
        assert device.pinned.keys() <= {buffer.data_ptr() for buffer in _staging(weights)}
    return seen, wrong, state.faults


def _staging(weights: Any) -> list[torch.Tensor]:
    return [buffer for one in weights._exports.values() for buffer in one._staging]


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def run(memory: Path, model: Path, case: str = "TP1", dtype: str | None = None, parcel_bytes: int | None = None,
        plant: str | None = None) -> Any:  # fmt: skip
    return run_ranks(publish, CASES[case].world_size, case, model, memory, dtype, parcel_bytes, plant,
                     platform="rehearsed")  # fmt: skip


def test_the_launches_and_waits_of_a_publish_are_as_many_for_4_layers_as_for_40(tmp_path: Path, memory: Path) -> None:
    found = []
    for num_layers in (4, 40):
        model = hf_models.draw("qwen3", tmp_path / f"{num_layers}", num_hidden_layers=num_layers)
        ((seen, wrong, faults),) = run(memory, model, dtype="bfloat16")
        assert wrong == [[]] * 3
        assert faults == []
        for one in seen:
            assert one.num_tensors > 11 * num_layers
            # The weights once, and the digests.
            assert sum(copy.num_bytes for copy in one.fetched) <= 1.05 * one.num_bytes
            assert one.num_pageable == 16 * one.num_tensors
        found.append([(one.launched, len(one.fetched), one.num_waits) for one in seen[1:]])
    assert found[0] == found[1]
    for launched, num_copies, num_waits in found[0]:
        assert set(launched) == {"digest", "pack"}
        assert num_copies == 2
        # One parcel, and the read of the digests.
        assert num_waits == 2


@pytest.mark.parametrize("case", ["TP1", "TP2"])
def test_parcels_take_turns_in_two_buffers_and_each_is_waited_for_once(tmp_path: Path, memory: Path, case: str) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    ranks = run(memory, model, case, parcel_bytes=PARCEL_BYTES)
    (first, wrong, _), *_ = ranks
    assert wrong == [[]] * 3
    assert not any(faults for _, _, faults in ranks)
    for whole, *parts in zip(first, *(seen for seen, _, _ in ranks), strict=True):
        assert sum(one.num_pinned for one in parts) == whole.num_bytes
        for one in parts:
            assert one.num_pageable == 16 * whole.num_tensors
            assert not any(copy.is_blocking for copy in one.fetched if copy.is_pinned)
    for seen, _, _ in ranks:
        for one in seen[1:]:
            # A parcel may end before the limit, where a row begins; one more wait reads the digests.
            num_parcels = one.num_pinned / (0.9 * PARCEL_BYTES) + 1
            assert 4 < one.num_waits <= num_parcels + 1


def test_files_that_may_not_be_locked_are_filled_through_a_locked_buffer(tmp_path: Path, memory: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    ((seen, wrong, faults),) = run(memory, model, parcel_bytes=PARCEL_BYTES, plant="locking refused")
    assert wrong == [[]] * 3
    assert faults == []
    assert seen


@pytest.mark.parametrize("plant", ["counted before it has arrived", "a stale slice"])
def test_tensors_that_arrive_torn_or_stale_are_found_by_their_digests(tmp_path: Path, memory: Path, plant: str) -> None:
    # With several parcels, the device itself has a fault if the host does not wait.
    ((_, wrong, _),) = run(memory, hf_models.draw("qwen3", tmp_path / "model"), plant=plant)
    assert any(wrong)


@pytest.mark.parametrize("plant", ["one buffer", "copied before it is packed"])
def test_a_buffer_that_is_used_out_of_turn_is_a_fault_of_the_device(tmp_path: Path, memory: Path, plant: str) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    ((_, _, faults),) = run(memory, model, parcel_bytes=PARCEL_BYTES, plant=plant)
    assert any("two streams, and no event between" in fault for fault in faults)
