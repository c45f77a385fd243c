"""A publish through files from several hosts: a host is a folder that only its ranks see."""

import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from megatron_rl.errors import InputError, NoRoom, PlatformError
from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.shared.weights.files import Writer
from megatron_rl.trainer.mcore.publish.files import FilesTransport
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from tests import hf_models
from tests.deliveries import Service, change, give_memory, load_arriving
from tests.distributed.layouts import CASES, build, start_session
from tests.ranks import run_ranks

pytestmark = pytest.mark.each_change
memory = pytest.fixture(give_memory)


class Sidecar(Service):
    """A sidecar that reads the tensors it is told of, as an engine on rank 0's host does."""

    def __init__(self) -> None:
        self.names: list[set[str]] = []

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        self.names.append(set(load_file(Path(weights.folder) / "model.safetensors")))
        return PublishAnswer()


def publish(case: str, model: Path, hosts: list[Path], num_publishes: int) -> tuple[list[str], list[set[str]], str]:
    """Return the fingerprints, the tensors that the sidecar read, and the error at the start."""
    sidecar = Sidecar()
    with start_session(CASES[case]) as session:
        weights = build(session, CASES[case], model).weights
        receiver = sidecar if session.rank == 0 else None
        try:
            transport = FilesTransport(hosts[session.rank] / "shared" / "run")
            publisher = Publisher(weights, session, receiver, "run", transport)
        except PlatformError as error:
            return [], [], str(error)
        fingerprints = [publisher.publish(version) for version in range(num_publishes)]
        publisher.close()
    return fingerprints, sidecar.names, ""


def hosts_of(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    return [folder / name for name in names]


def test_a_host_that_holds_copies_of_the_weights_alone_needs_no_folder(tmp_path: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    hosts = hosts_of(tmp_path, "first", "second")
    # The third publish overwrites the files of the first.
    (first, names, _), (second, *_) = run_ranks(publish, 2, "DP2+distopt", model, hosts, 3)
    assert first == second
    assert len(set(first)) == 1
    assert names == [set(load_file(model / "model.safetensors"))] * 3
    assert list(hosts[1].iterdir()) == []


def test_hosts_that_hold_parts_of_the_weights_end_the_run_at_the_start_with_a_remedy(tmp_path: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    hosts = hosts_of(tmp_path, "first", "second")
    # The other host may hold files that an earlier run left there.
    (hosts[1] / "shared" / "run").mkdir(parents=True)
    for _, _, message in run_ranks(publish, 2, "TP2", model, hosts, 1):
        assert message.startswith("rank 1 on ")
        assert f"does not find rank 0's folder {hosts[1]}/shared/run" in message
        assert "--rollout-transport nccl or hccl" in message
    # One host, and nothing of the search stays.
    (_, names, message), _ = run_ranks(publish, 2, "TP2", model, hosts_of(tmp_path, "first", "first"), 1)
    assert (names, message) == ([set(load_file(model / "model.safetensors"))], "")


class EarlyReader(Service):
    """A reader that reads files as they come, in another order than they are written in, and checks them.

    Beside this it keeps the files that it saw, and the number of tensors that it had to wait for.
    """

    def __init__(self) -> None:
        self.files: list[int] = []
        self.num_waits: list[int] = []
        self.is_waiting = threading.Event()

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        folder = Path(weights.folder)
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            self.is_waiting.set()
            time.sleep(seconds)

        assert load_arriving(folder, weights.fingerprint, sleep=sleep)
        self.files.append((folder / "model.safetensors").stat().st_ino)
        self.num_waits.append(len(waits))
        return PublishAnswer()


def publish_changing(case: str, model: Path, folder: Path) -> tuple[list[int], list[int], list[str]]:
    """Return the reader's observations over some publishes, and the remains of the run's folder."""
    reader = EarlyReader()
    put = Writer.put

    def late_put(self: Writer, *arguments: Any) -> None:
        assert session.rank != 0 or reader.is_waiting.wait(60)
        put(self, *arguments)

    with start_session(CASES[case]) as session, mock.patch.object(Writer, "put", late_put):
        weights = build(session, CASES[case], model).weights
        receiver = reader if session.rank == 0 else None
        publisher = Publisher(weights, session, receiver, "run", FilesTransport(folder / "run"))
        for version in range(5):
            reader.is_waiting.clear()
            publisher.publish(version)
            change(weights)
        publisher.close()
    return reader.files, reader.num_waits, [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("case", ["TP2", "DP2+distopt"])
def test_files_in_memory_are_read_while_ranks_write_them_and_two_folders_take_turns(
    case: str, tmp_path: Path, memory: Path
) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    (files, num_waits, left), _ = run_ranks(publish_changing, 2, case, model, memory)
    assert len(num_waits) == 5
    assert min(num_waits) > 0
    assert files == [files[0], files[1], files[0], files[1], files[0]]
    assert files[0] != files[1]
    assert left == []


def fail_to_write(model: Path, folder: Path) -> tuple[str, list[str]]:
    """Return a rank's error when another rank cannot write, and the remains of the version."""

    def full(self: Writer, *arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with start_session(CASES["TP2"]) as session:
        weights = build(session, CASES["TP2"], model).weights
        reader = NobodyWrites() if session.rank == 0 else None
        publisher = Publisher(weights, session, reader, "run", FilesTransport(folder / "run"))
        put = full if session.rank == 1 else Writer.put
        with mock.patch.object(Writer, "put", put), pytest.raises(NoRoom) as caught:
            publisher.publish(0)
        if reader is not None:
            assert reader.is_told.wait(60)
        session.barrier()
        return str(caught.value), [path.name for path in (folder / "run").iterdir()]


class NobodyWrites(Service):
    """A reader that waits for the first tensor, until it learns that no rank writes it."""

    def __init__(self) -> None:
        self.is_told = threading.Event()

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        try:
            has_all = load_arriving(Path(weights.folder), weights.fingerprint)
        except InputError:
            # The publish may have failed and removed its files before this begins.
            self.is_told.set()
            raise
        if not has_all:
            self.is_told.set()
        return PublishAnswer()


def test_a_rank_that_cannot_write_ends_the_publish_on_every_rank_and_for_early_readers(
    tmp_path: Path, memory: Path
) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    for message, left in run_ranks(fail_to_write, 2, model, memory):
        assert "No space left on device" in message
        assert left == []
