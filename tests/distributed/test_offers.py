"""Ranks of a real model offer their own memory, and another process copies the published weights from there."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.errors import UsageError
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.platforms.platform import CannotShare
from megatron_rl.shared.protocol.wire import PublishAnswer, Weights
from megatron_rl.shared.weights import offer
from megatron_rl.shared.weights.files import read_digests
from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.trainer.mcore.model.weights import FilesBegun
from megatron_rl.trainer.mcore.publish import offers
from megatron_rl.trainer.mcore.publish.files import FilesTransport
from megatron_rl.trainer.mcore.publish.publisher import Publisher
from tests import hf_models
from tests.deliveries import Service, change, give_memory
from tests.distributed.layouts import CASES, build, start_session
from tests.offers import HostSharing
from tests.ranks import ROOT, run_ranks

pytestmark = pytest.mark.each_change
memory = pytest.fixture(give_memory)
_TAKEN = PublishAnswer(through="ipc")


class Reader(Service):
    """A sidecar whose engine is a process of its own, which reads what is offered."""

    def __init__(self, answer: PublishAnswer) -> None:
        self.answers: list[dict[str, Any]] = []
        self.messages: list[Weights] = []
        self._answer = answer
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.offer_reader"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def publish(self, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        self.messages.append(weights)
        self.tell(weights.folder)
        self.answers.append(json.loads(self.hear()))
        return self._answer

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def publishing(
    case: str,
    model: Path,
    folder: Path,
    sharing: Any,
    answer: PublishAnswer = _TAKEN,
    through: Any = "auto",
    **options: Any,
) -> Iterator[tuple[Any, Any, Reader | None]]:
    """Start a rank that publishes; rank 0 has a reader too."""
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(start_session(CASES[case]))
        stack.enter_context(mock.patch.object(CpuPlatform, "device_sharing", return_value=sharing))
        weights = build(session, CASES[case], model).weights
        reader = stack.enter_context(contextlib.closing(Reader(answer))) if session.rank == 0 else None
        yield (
            weights,
            Publisher(weights, session, reader, "run", FilesTransport(folder / "run", through), **options),
            reader,
        )


def find_wrong_files(folder: Path) -> list[str]:
    digests = read_digests(folder)
    found = load_file(folder / "model.safetensors")
    assert found.keys() == digests.keys()
    return [name for name, tensor in found.items() if digest(tensor).tolist() != digests[name]]


def publish(
    case: str, model: Path, folder: Path, is_moved: bool = False, is_move_missed: bool = False
) -> tuple[list[Any], list[Any], int]:
    """Publish four versions; return what the reader found, what was left in the folder, and the storages shared."""
    sharing = HostSharing()
    left, before = [], []
    with publishing(case, model, folder, sharing) as (weights, publisher, reader), contextlib.ExitStack() as stack:
        if is_move_missed:
            stack.enter_context(mock.patch.object(offers, "find_addresses", return_value=[1]))
        for version in range(4):
            publisher.publish(version)
            if reader is not None:
                location = Path(reader.messages[-1].folder)
                left.append((find_wrong_files(location), (location / "offer").exists()))
            for shard in weights.shards if is_moved else ():
                # Memory that parameters have left keeps its numbers.
                before.append(shard.parameter.data)
                shard.parameter.data = shard.parameter.data.clone()
            change(weights)
        publisher.close()
    return [] if reader is None else reader.answers, left, sharing.num_shared


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("qwen3", "TP1"),
        ("qwen3", "TP2"),
        ("qwen3", "PP2"),
        ("qwen3", "DP2+distopt"),
        ("qwen3_moe", "EP2"),
    ],
)
def test_another_process_copies_every_tensor_from_the_ranks_memory_whatever_the_layout(
    family: str, case: str, tmp_path: Path, memory: Path
) -> None:
    model = hf_models.draw(family, tmp_path / "model")
    ranks = run_ranks(publish, CASES[case].world_size, case, model, memory)
    answers, left, _ = ranks[0]
    num_bytes = sum(tensor.nbytes for tensor in load_file(model / "model.safetensors").values())
    for answer in answers:
        assert (answer["is_offered"], answer["is_announced"], answer["wrong"]) == (True, True, [])
        assert answer["num_bytes"] == num_bytes
        # Each storage is opened once, at the first version.
        assert answer["num_opened"] == sum(num_shared for _, _, num_shared in ranks)
    assert len(answers) == 4
    # The files are complete, and what was offered is not offered any more.
    assert left == [([], False)] * 4


def test_parameters_that_move_are_shared_again(tmp_path: Path, memory: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    ((answers, _, num_shared),) = run_ranks(publish, 1, "TP1", model, memory, True)
    assert [answer["wrong"] for answer in answers] == [[]] * 4
    assert answers[-1]["num_opened"] == num_shared > answers[0]["num_opened"] > 0


def test_memory_that_parameters_have_left_is_found_by_the_digests(tmp_path: Path, memory: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    ((answers, left, _),) = run_ranks(publish, 1, "TP1", model, memory, True, True)
    assert answers[0]["wrong"] == []
    assert all(answer["wrong"] for answer in answers[1:])
    assert left == [([], False)] * 4


def publish_to_a_slow_reader(model: Path, folder: Path) -> tuple[bool, list[str]]:
    """Publish to an engine that reads the offer after its sidecar has answered.

    Return whether the publish waited for the engine, and the tensors that it read wrongly.
    """
    is_held, may_read = threading.Event(), threading.Event()
    found: list[str] = []
    waited: list[int] = []
    true = offer._lock

    def announce(self: Reader, weights: Weights, deadline_seconds: float) -> PublishAnswer:
        self.tell(f"{weights.folder} held")
        assert self.hear() == "held\n"
        is_held.set()
        return PublishAnswer()

    def noted(descriptor: int, kind: int) -> bool:
        is_free = true(descriptor, kind)
        if not is_free:
            waited.append(kind)
            may_read.set()
        return is_free

    with (
        mock.patch.object(Reader, "publish", announce),
        mock.patch.object(offer, "_lock", noted),
        publishing("TP1", model, folder, HostSharing()) as (weights, publisher, reader),
    ):
        assert reader is not None

        def read() -> None:
            assert is_held.wait(60)
            assert may_read.wait(60)
            reader.tell("")
            found.extend(json.loads(reader.hear())["wrong"])

        thread = threading.Thread(target=read)
        thread.start()
        publisher.publish(0)
        change(weights)
        # A publish that does not wait lets the engine read only now.
        may_read.set()
        thread.join()
        publisher.close()
    return bool(waited), found


def test_weights_do_not_change_before_every_reader_of_the_offer_has_ended(tmp_path: Path, memory: Path) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    assert run_ranks(publish_to_a_slow_reader, 1, model, memory) == [(True, [])]


def order_of_a_publish(model: Path, folder: Path, is_offered: bool) -> list[str]:
    """Return the order in which a publish computes the probe, writes files and returns."""
    events: list[str] = []
    write = FilesBegun.write

    class Probe:
        def tokens(self, version: int) -> bytes:
            return b""

        def send(self, *_: Any) -> None:
            events.append("probe")

    def noted(self: FilesBegun, note: Any = None) -> None:
        events.append("write")
        write(self, note)
        events.append("written")

    sharing = HostSharing() if is_offered else None
    with (
        mock.patch.object(FilesBegun, "write", noted),
        publishing("TP1", model, folder, sharing, probe=Probe()) as (_, publisher, _reader),
    ):
        publisher.publish(0)
        events.append("returned")
        publisher.close()
    return events


def test_engines_that_read_an_offer_wait_for_the_probe_and_for_no_file_but_a_publish_does(
    tmp_path: Path, memory: Path
) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    assert run_ranks(order_of_a_publish, 1, model, memory, True) == [["probe", "write", "written", "returned"]]
    assert run_ranks(order_of_a_publish, 1, model, memory, False) == [["write", "written", "probe", "returned"]]


class Refusing(HostSharing):
    def share(self, storage: torch.UntypedStorage) -> Any:
        raise CannotShare("invalid argument")


def refuse(model: Path, folder: Path, case: str, through: str, dtype: str | None, plant: str) -> tuple[str, list[Any]]:
    """Return the error of a publish, and whether each version was offered."""
    sharing: Any = {
        "no sharing": None, "an obstacle": HostSharing("memory has expandable segments"), "a refusal": Refusing(),
    }.get(plant, HostSharing())  # fmt: skip
    answer = PublishAnswer(through="files", reasons=("an engine's reason",))
    found: list[Any] = []
    with contextlib.ExitStack() as stack:
        if plant == "not in memory":
            stack.enter_context(mock.patch(f"{FilesTransport.__module__}.is_in_memory", return_value=False))
        elif plant == "another host":
            names = "megatron_rl.trainer.mcore.publish.offers.identify_host"
            stack.enter_context(mock.patch(names, return_value=(os.environ["RANK"],)))
        try:
            options = {"through": through, "dtype": dtype}
            with publishing(case, model, folder, sharing, answer, **options) as (_, publisher, reader):
                for version in range(2):
                    publisher.publish(version)
                found = [] if reader is None else [answer["is_offered"] for answer in reader.answers]
                publisher.close()
        except UsageError as error:
            return str(error), found
    return "", found


@pytest.mark.parametrize(
    ("plant", "case", "dtype", "reason"),
    [
        ("no sharing", "TP1", None, "the trainer's platform is cpu"),
        ("not in memory", "TP1", None, "the folder for published files is not in memory"),
        ("an obstacle", "TP1", None, "the trainer's memory has expandable segments"),
        ("a refusal", "TP1", None, "memory of rank 0 cannot be shared: invalid argument"),
        ("another dtype", "TP1", "bfloat16", "parameters are trained in float32 and published in bfloat16: decoder."),
        ("another host", "TP2", None, "the trainer's ranks are in several namespaces, or on several hosts"),
    ],
)
def test_a_run_that_cannot_offer_its_memory_publishes_files_or_is_refused_by_name(
    plant: str, case: str, dtype: str | None, reason: str, tmp_path: Path, memory: Path
) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    num_ranks = CASES[case].world_size
    (message, found), *_ = run_ranks(refuse, num_ranks, model, memory, case, "auto", dtype, plant)
    assert (message, found) == ("", [False, False])
    for message, _ in run_ranks(refuse, num_ranks, model, memory, case, "ipc", dtype, plant):
        assert message.startswith("--publish-through ipc cannot be: ")
        assert reason in message


def test_a_run_offers_nothing_if_it_is_told_so_and_nothing_more_once_an_engine_does_not_take_it(
    tmp_path: Path, memory: Path
) -> None:
    model = hf_models.draw("qwen3", tmp_path / "model")
    assert run_ranks(refuse, 1, model, memory, "TP1", "files", None, "") == [("", [False, False])]
    assert run_ranks(refuse, 1, model, memory, "TP1", "auto", None, "") == [("", [True, False])]
    ((message, _),) = run_ranks(refuse, 1, model, memory, "TP1", "ipc", None, "")
    assert message == "--publish-through ipc cannot be: an engine's reason. Write auto or files"
