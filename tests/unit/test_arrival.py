"""Folders that are read while they are written."""

import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.shared.weights import folders
from megatron_rl.shared.weights.folders import Arrival, Counter, is_in_memory
from megatron_rl.shared.weights.mapping import TensorSpec

SPECS = [TensorSpec("b", (4, 2), "float32"), TensorSpec("a", (3,), "float32")]


def never(_: float) -> None:
    raise AssertionError("it waits")


def test_a_folder_without_counts_is_one_that_was_written_before(tmp_path: Path) -> None:
    with Arrival(tmp_path, SPECS, never) as found:
        assert found.is_coming()
        assert all(found.wait_for(spec.name) for spec in SPECS)


def test_a_tensor_is_waited_for_until_all_its_writers_have_written_it(tmp_path: Path) -> None:
    steps: list[str] = []
    with folders.writing(tmp_path, 2, 2):
        counters = [Counter(tmp_path, SPECS, writer, 2) for writer in range(2)]
        halves = torch.zeros(2, 2)

        def write_more(_: float) -> None:
            counters[len(steps)].add("b", halves.numel())
            steps.append("b")

        with Arrival(tmp_path, SPECS, write_more) as found:
            assert found.wait_for("b")
            assert steps == ["b", "b"]
            counters[1].add("a", 3)
            assert found.wait_for("a")
            assert steps == ["b", "b"]
    with Arrival(tmp_path, SPECS, never) as found:
        assert found.is_coming()
        assert found.wait_for("a")


@pytest.mark.parametrize("num_writers", [1, 3, 2000])
def test_a_look_at_one_tensor_finds_those_after_it_that_are_complete_and_no_others(
    tmp_path: Path, num_writers: int
) -> None:
    specs = [TensorSpec(f"{number:04}", (2,), "float32") for number in range(700)]
    with folders.writing(tmp_path, len(specs), num_writers), Arrival(tmp_path, specs, never) as found:
        with Counter(tmp_path, specs, 0, num_writers) as counter:
            for spec in specs[::2]:
                counter.add(spec.name, 1)
            with Counter(tmp_path, specs, num_writers - 1, num_writers) as other:
                for spec in specs[::2]:
                    (counter if num_writers == 1 else other).add(spec.name, 1)
        assert [found._is_whole(spec.name) for spec in specs] == [number % 2 == 0 for number in range(len(specs))]


def test_a_folder_that_no_process_writes_any_more_is_not_waited_for(tmp_path: Path) -> None:
    with folders.writing(tmp_path, 2, 1), Counter(tmp_path, SPECS, 0, 1) as counter:
        counter.add("a", 3)
        counter.add("b", 6)
        with Arrival(tmp_path, SPECS) as found:
            assert found.is_coming()
    with Arrival(tmp_path, SPECS, never) as found:
        assert not found.is_coming()
        assert found.wait_for("a")
        assert not found.wait_for("b")


def test_the_counts_begin_again_with_each_writing(tmp_path: Path) -> None:
    for _ in range(2):
        with folders.writing(tmp_path, 2, 1), Counter(tmp_path, SPECS, 0, 1) as counter:
            with Arrival(tmp_path, SPECS) as found:
                assert not found._is_whole("a")
            counter.add("a", 3)
            with Arrival(tmp_path, SPECS, never) as found:
                assert found.wait_for("a")


def write_and_hang(folder: Path, started: Any) -> None:
    with folders.writing(folder, 2, 1), Counter(folder, SPECS, 0, 1) as counter:
        counter.add("a", 3)
        started.set()
        threading.Event().wait()


@pytest.mark.each_change
def test_a_reader_learns_that_the_writer_was_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    writer = context.Process(target=write_and_hang, args=(tmp_path, started))
    writer.start()
    assert started.wait(60)
    polls: list[float] = []

    def kill(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 10:
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()

    with Arrival(tmp_path, SPECS, kill) as found:
        assert found.wait_for("a")
        assert not found.wait_for("b")
    assert len(polls) == folders._POLLS_PER_LOOK


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
28 22 {0} / /memory rw,nosuid - {1} tmpfs rw,size=24684084k
"""


@pytest.mark.parametrize(("kind", "expected"), [("tmpfs", True), ("nfs4", False)])
def test_a_folder_is_in_memory_by_the_kind_of_its_mount(tmp_path: Path, kind: str, expected: bool) -> None:
    assert is_in_memory(Path("/dev/shm"))
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.format(f"{os.major(device)}:{os.minor(device)}", kind))
    assert is_in_memory(tmp_path, mounts) is expected
    # On a system that cannot tell, folders are read when they are complete.
    assert not is_in_memory(tmp_path, tmp_path / "none")
