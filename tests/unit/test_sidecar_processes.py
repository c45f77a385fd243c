"""A process that has ended or is stopped is noticed; one that comes and goes is not."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.sidecar.processes import NUM_LOOKS, ProcessWatch, list_group, read_process

CODE = """
import subprocess, sys
core = subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys
worker = subprocess.Popen(["sleep", "600"])
print(worker.pid, flush=True)
worker.wait()
sys.stdin.read()
'''], stdin=subprocess.PIPE)
print(core.pid, flush=True)
core.wait()
sys.stdin.read()
"""


@contextlib.contextmanager
def leading(code: str, name: str = sys.executable) -> "Iterator[subprocess.Popen[bytes]]":
    """Run code in a process that has this title and a process group of its own."""
    leader = subprocess.Popen(
        [name, "-u", "-c", code], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield leader
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


@pytest.fixture
def line() -> Iterator[list[int]]:
    """Start a server, its core and its worker."""
    with leading(CODE) as server:
        yield [server.pid, *(int(server.stdout.readline()) for _ in range(2))]


def until_fault(watch: ProcessWatch, seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    while (fault := watch.find_fault()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return fault


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_end_of_each_needed_process_is_named(line, place):
    watch = ProcessWatch(line[0])
    watch.add(line[-1])
    assert watch.find_fault() is None
    os.kill(line[place], signal.SIGKILL)
    assert until_fault(watch).startswith(f"its process {line[place]} (")


def test_a_core_that_ends_before_it_is_known_to_be_needed_is_named_by_its_title():
    code = """
import subprocess
core = subprocess.Popen(["VLLM::EngineCore", "600"], executable="/bin/sleep")
print(core.pid, flush=True)
core.wait()
input()
"""
    with leading(code) as server:
        core = int(server.stdout.readline())
        # The kernel tells a parent of an exec a moment before the title can be read.
        while not Path(f"/proc/{core}/cmdline").read_bytes().startswith(b"VLLM::"):
            time.sleep(0.01)
        watch = ProcessWatch(server.pid)
        assert watch.find_fault() is None
        os.kill(core, signal.SIGKILL)
        assert until_fault(watch) == f"its process {core} (VLLM::EngineCore 600) has ended"


def test_a_fork_that_still_has_its_parents_title_may_end():
    """Begin a fork as a process does that calls a program."""
    code = """
import os, sys
child = os.fork()
if child == 0:
    sys.stdin.readline()
    os._exit(0)
print(child, flush=True)
os.waitpid(child, 0)
print("ended", flush=True)
sys.stdin.read()
"""
    with leading(code, "VLLM::EngineCore") as core:
        child = int(core.stdout.readline())
        assert child in list_group(core.pid)
        watch = ProcessWatch(core.pid)
        assert watch.find_fault() is None
        core.stdin.write(b"\n")
        core.stdin.flush()
        assert core.stdout.readline() == b"ended\n"
        assert watch.find_fault() is None


@pytest.mark.parametrize("is_known", [True, False])
def test_a_stopped_process_is_named_after_some_looks_and_not_if_it_runs_again_before(line, is_known):
    watch = ProcessWatch(line[0])
    if is_known:
        watch.add(line[-1])
    victim = line[1]

    def look_while_stopped() -> list[str | None]:
        os.kill(victim, signal.SIGSTOP)
        while read_process(victim).state != "T":
            time.sleep(0.01)
        return [watch.find_fault() for _ in range(NUM_LOOKS - 1)]

    assert look_while_stopped() == [None] * (NUM_LOOKS - 1)
    os.kill(victim, signal.SIGCONT)
    while read_process(victim).state == "T":
        time.sleep(0.01)
    assert watch.find_fault() is None
    assert look_while_stopped() == [None] * (NUM_LOOKS - 1)
    assert f"its process {victim} (" in watch.find_fault()
    assert "is stopped" in watch.find_fault()


def test_a_process_of_the_group_that_is_not_needed_may_end(line):
    watch = ProcessWatch(line[0])
    watch.add(line[1])
    assert set(line) <= set(list_group(line[0]))
    os.kill(line[2], signal.SIGKILL)
    while (status := read_process(line[2])) is not None and status.state != "Z":
        time.sleep(0.01)
    assert watch.find_fault() is None


def test_a_process_that_does_not_descend_from_the_leader_is_not_watched(line):
    with subprocess.Popen(["sleep", "600"]) as other:
        watch = ProcessWatch(line[0])
        watch.add(other.pid)
        other.kill()
    assert watch.find_fault() is None


def test_a_number_that_now_belongs_to_another_process_is_one_that_has_ended(line):
    watch = ProcessWatch(line[0])
    watch.add(line[-1])
    known, title = watch._needed[line[1]]
    watch._needed[line[1]] = known._replace(started=known.started - 1), title
    assert f"its process {line[1]} (" in watch.find_fault()
