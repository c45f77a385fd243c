"""One rank that fails, or is lost, ends all of them, with its reason."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.config.settings import LoopConfig
from megatron_rl.errors import PlatformError
from megatron_rl.observe.rank_places import read_places
from megatron_rl.trainer.loop import lifelines, watch
from megatron_rl.trainer.loop.lifelines import Hub, Spoke, listen
from megatron_rl.trainer.loop.stop import Course, StopRequest
from megatron_rl.trainer.loop.watch import Stalls
from tests.ranks import ROOT, free_port

# No test asks how soon: this is the longest wait.
DEADLINE = 120
CODE = """
    import os, signal, sys, time, types
    from pathlib import Path
    # A shell starts what it puts into the background with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from megatron_rl.errors import InputError
    from megatron_rl.observe.rank_places import RankPlaces
    from megatron_rl.trainer.loop.watch import Watch

    rank, what = int(os.environ["RANK"]), sys.argv[1]
    watch = Watch.of_environment()
    with watch:
        if rank == 0:
            watch._lines.wait_until_told(60)
            watch.say_store(1)
        else:
            watch.store_port(60)
        print("there", flush=True)
        if rank == 1 and what == "error":
            raise InputError("row 7 has no prompt")
        if rank == 1 and what == "crash":
            raise ZeroDivisionError("division by zero")
        if what == "fork" and rank == 1 and os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        if what == "stall":
            # One finds no more to say, as a process that is stopped.
            place = (7, "train") if rank else (9, "update")
            watch.follow(types.SimpleNamespace(place=place, tidy=lambda: None), 0.2)
        if what == "show":
            followed = types.SimpleNamespace(place=(7, "train" if rank else "update"), tidy=lambda: None)
            watch.follow(followed, 20, None if rank else RankPlaces(Path(sys.stdin.readline().strip())))
            sys.stdin.readline()
            what = "nothing"
        if what != "nothing":
            time.sleep(600)
        while rank == 0 and len(watch._done) < watch.world_size - 1:
            time.sleep(0.01)
        # Those that are done close their connections.
        time.sleep(0.5 if rank == 0 else 0)
"""


class Ranks:
    """Processes that watch each other; killed at the end."""

    def __init__(self, what: str, world_size: int = 2, errors: Any = subprocess.PIPE, **environment: str) -> None:
        place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(CODE), what],
                cwd=ROOT, env={**os.environ, **place, **environment, "RANK": str(rank)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()
            process.wait()

    def wait_until_there(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"

    def ends(self) -> tuple[list[int], list[str]]:
        errors = [process.communicate(timeout=DEADLINE)[1] for process in self.processes]
        return [process.returncode for process in self.processes], errors


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("error", 4, "the run ended: row 7 has no prompt (rank 1)"),
        ("crash", 1, "the run ended: ZeroDivisionError: division by zero (rank 1)"),
        ("nothing", 0, ""),
    ],
)
def test_all_ranks_end_as_one_does_while_they_wait_for_it(what, code, said):
    with Ranks(what, 3) as ranks:
        codes, errors = ranks.ends()
    assert codes == [code] * 3
    assert all(said in text for text in errors)
    assert ["Traceback" in text for text in errors] == [False, what == "crash", False]


def test_a_rank_tells_the_launcher_why_all_end(tmp_path):
    path = tmp_path / "error.json"
    with Ranks("error", TORCHELASTIC_ERROR_FILE=str(path)) as ranks:
        ranks.ends()
    message = json.loads(path.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "row 7 has no prompt (rank 1)"
    assert int(message["extraInfo"]["timestamp"]) <= time.time()


@pytest.mark.parametrize("what", ["error", "crash", "wait"])
def test_ranks_that_share_a_terminal_say_once_why_they_end(what, tmp_path):
    """Kill the third rank, if all wait."""
    with (tmp_path / "errors").open("w") as errors, Ranks(what, 4, errors) as ranks:
        if what == "wait":
            ranks.wait_until_there()
            ranks.processes[2].kill()
        codes, _ = ranks.ends()
    assert codes == {"error": [4] * 4, "crash": [1] * 4, "wait": [5, 5, -signal.SIGKILL, 5]}[what]
    said = (tmp_path / "errors").read_text()
    assert said.count("the run ended: ") == 1
    assert (what == "wait") == ("the run ended: its process ended without a message" in said)


def test_ranks_that_make_no_progress_end_by_name():
    with Ranks("stall", 3) as ranks:
        codes, errors = ranks.ends()
    assert codes == [5, 5, 5]
    assert "no rank has made progress for 0.00333333 minutes, and none waits for engines" in errors[0]
    assert "--distributed-timeout-minutes" in errors[0]


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("says", "is_stalled"),
    [
        (lambda time: [(0, 3, "train"), (1, 4, "update")], True),
        # It is stopped, and sends nothing any more.
        (lambda time: [(0, 3, "train")], True),
        (lambda time: [(0, 3, "train"), (1, time, "train")], False),
        (lambda time: [(0, 3, "train"), (1, 4, "wait")], False),
        (lambda time: [(0, 3, "publish"), (1, 4, "other")], False),
    ],
)
def test_ranks_are_stalled_when_none_makes_progress_and_none_waits_for_others(says, is_stalled):
    clock = Clock()
    stalls = Stalls(600, clock)
    for rank in (0, 1):
        stalls.receive(rank, 1, "train")
    found = []
    for time_ in range(0, 1300, 30):
        clock.seconds = time_
        for said in says(time_):
            stalls.receive(*said)
        found.append(stalls.find() is not None)
    assert found == [is_stalled and time_ > 600 for time_ in range(0, 1300, 30)]


def test_what_a_rank_says_of_its_place_counts_as_progress():
    clock, first = Clock(), watch.Watch(0, 2)
    first._stalls = stalls = Stalls(600, clock)
    for clock.seconds in range(0, 1800, 300):
        first.receive(["at", 1, clock.seconds, "train", "host"])
        assert stalls.find() is None
    clock.seconds += 601
    assert "(ranks 1 in train)" in (stalls.find() or "")


def test_a_stall_says_where_every_rank_is():
    clock = Clock()
    stalls = Stalls(600, clock)
    for rank, part in enumerate(("train", "update", "train")):
        stalls.receive(rank, 5, part)
    clock.seconds = 601
    assert "(ranks 0, 2 in train; 1 in update)" in (stalls.find() or "")


def test_rank_0_writes_what_every_rank_does_and_removes_it_at_the_end(tmp_path):
    with Ranks("show", 3) as ranks:
        ranks.wait_until_there()
        inputs = [process.stdin for process in ranks.processes]
        inputs[0].write(f"{tmp_path}\n")
        inputs[0].flush()
        end = time.monotonic() + DEADLINE
        while (found := read_places(tmp_path)) is None or len(found.ranks) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
        for given in inputs:
            given.write("\n")
            given.flush()
        assert ranks.ends()[0] == [0, 0, 0]
    parts = [(place.host, place.part) for place in found.ranks.values()]
    assert parts == [(socket.gethostname(), part) for part in ("update", "train", "train")]
    assert read_places(tmp_path) is None


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(victim):
    with Ranks("wait", 3) as ranks:
        ranks.wait_until_there()
        ranks.processes[victim].kill()
        codes, errors = ranks.ends()
    assert codes == [-signal.SIGKILL if rank == victim else 5 for rank in range(3)]
    reason = "the run ended: its process ended without a message: it was killed, or its host cannot be reached"
    for rank in {0, 1, 2} - {victim}:
        assert f"{reason} (rank {victim})" in errors[rank]


def test_a_process_that_a_rank_forked_off_does_not_hide_that_it_is_gone():
    with Ranks("fork") as ranks:
        ranks.wait_until_there()
        ranks.processes[1].kill()
        assert ranks.processes[0].wait(DEADLINE) == 5


def test_a_rank_that_is_stopped_for_a_while_is_not_lost():
    with Ranks("wait") as ranks:
        ranks.wait_until_there()
        ranks.processes[1].send_signal(signal.SIGSTOP)
        # The other one continues: it answers that it is interrupted, and nothing else.
        ranks.processes[0].send_signal(signal.SIGINT)
        assert ranks.processes[0].wait(DEADLINE) == 130
        ranks.processes[1].send_signal(signal.SIGCONT)
        codes, errors = ranks.ends()
    assert codes == [130, 130]
    assert "the run ended: interrupted: no iteration had begun, and nothing is lost (rank 0)" in errors[1]


def test_the_loss_of_a_host_is_noticed_within_twenty_seconds():
    assert lifelines.NOTICED_SECONDS <= 20
    assert watch._MISSING_SECONDS <= 20
    reader = listen("127.0.0.1", 0)
    with reader, socket.create_connection(reader.getsockname()) as connection:
        lifelines._Connection(connection)
        idle, interval, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert idle + interval * count == lifelines.NOTICED_SECONDS
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * lifelines.NOTICED_SECONDS


class Peer:
    """A peer that notes what it hears."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.losses: list[int] = []
        self.event = threading.Event()

    def receive(self, message) -> None:
        self.messages.append(message)
        self.event.set()

    def lost(self, rank) -> None:
        self.losses.append(rank)
        self.event.set()


def test_a_rank_that_comes_late_hears_what_was_said_before():
    first, second = Peer(), Peer()
    listener = listen("127.0.0.1", 0)
    hub = Hub(listener, 1, first)
    hub.tell("failed", "no prompts", 0, 4)
    spoke = Spoke("127.0.0.1", listener.getsockname()[1], 1, second)
    assert second.event.wait(DEADLINE)
    assert second.messages == [["failed", "no prompts", 0, 4]]
    hub.wait_until_told(DEADLINE)
    assert hub._all_there.is_set()
    spoke.tell("done", 1)
    assert first.event.wait(DEADLINE)
    assert first.messages == [["done", 1]]
    hub.close()
    spoke.close()


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\r\n\r\n", b'["failed", "nonsense", 1, 4]\n', b"[]\n", b'["rank", "x"]\n']
)
def test_a_connection_that_is_not_a_rank_is_ignored(words):
    peer, other = Peer(), Peer()
    listener = listen("127.0.0.1", 0)
    hub = Hub(listener, 1, peer)
    with socket.create_connection(listener.getsockname()) as connection:
        connection.sendall(words)
        # Connections are read in the order in which they speak.
        spoke = Spoke("127.0.0.1", listener.getsockname()[1], 1, other)
        spoke.tell("done", 1)
        assert peer.event.wait(DEADLINE)
    assert peer.messages == [["done", 1]]
    spoke.close()
    hub.close()
    assert peer.losses in ([], [1])


@pytest.mark.parametrize(
    "words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'["failed", "nonsense", 1, 4]\n', b'["rank", 1]\n']
)
def test_a_stranger_that_listens_at_the_address_of_rank_0_is_not_taken_for_it(words):
    first, second = Peer(), Peer()
    with listen("127.0.0.1", 0) as stranger:
        port = stranger.getsockname()[1]
        spoke = Spoke("127.0.0.1", port, 1, second)
        # The rank comes again: it has not taken the first answer for rank 0's.
        for _ in range(2):
            connection, _ = stranger.accept()
            with connection:
                connection.sendall(words)
    assert spoke.missing == [0]
    hub = Hub(listen("127.0.0.1", port), 1, first)
    hub.tell("store", 7)
    assert second.event.wait(DEADLINE)
    assert (second.messages, second.losses, spoke.missing) == ([["store", 7]], [], [])
    spoke.close()
    hub.close()


def test_ranks_of_torchrun_find_each_other_in_its_store(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert not watch.Watch.of_environment().is_connected
    store = dist.HashStore()
    first, second = watch.Watch(0, 2), watch.Watch(1, 2)
    first.connect_through(store)
    second.connect_through(store)
    first.say_store(77)
    assert second.store_port(DEADLINE) == 77
    for one in (second, first):
        one.close()


def test_ranks_that_have_never_been_there_are_named_after_a_while(monkeypatch, capsys):
    monkeypatch.setattr(watch, "_MISSING_SECONDS", 0.0)
    listener = listen("127.0.0.1", 0)
    hub = Hub(listener, 3, Peer())
    peer = Peer()
    spoke = Spoke("127.0.0.1", listener.getsockname()[1], 2, peer)
    hub.tell("store", 1)
    assert peer.event.wait(DEADLINE)
    watch.Watch(0, 4)._name_missing(hub, "here:1")
    assert "rank 0 has waited 0 s at here:1 for rank 1, 3, which has not connected" in capsys.readouterr().err
    watch.Watch(2, 4)._name_missing(spoke, "here:1")
    assert capsys.readouterr().err == ""
    spoke.close()
    hub.close()


def test_a_port_that_is_taken_is_an_error_of_the_environment(monkeypatch):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PlatformError, match=f"MASTER_PORT {port}: rank 0 cannot listen there .*free port"):
            watch.Watch(0, 2).connect("127.0.0.1", port)


def test_an_interrupt_ends_a_rank_by_name_and_without_a_traceback(monkeypatch, capsys):
    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    one = watch.Watch(3)
    for said in ("no iteration had begun, and nothing is lost", "the newest checkpoint is that of iteration 4"):
        with pytest.raises(SystemExit, match="130"), one:
            raise KeyboardInterrupt
        assert capsys.readouterr().err == f"megatron_rl: the run ended: interrupted: {said} (rank 3)\n"
        # The process that has ended held this for good.
        one._lock.release()
        run: Any = types.SimpleNamespace(
            place=(0, "other"),
            tidy=lambda: None,
            describe_interrupt=lambda: "the newest checkpoint is that of iteration 4",
        )
        one.follow(run, 600)


@pytest.mark.parametrize(
    ("has_begun", "grace", "reason", "said"),
    [
        (True, 0.0, "it was asked to stop, and its grace is over", "the iteration is finished and saved within 0 s"),
        # A grace longer than any test would wait.
        (
            False,
            1e6,
            "it was asked to stop before its first iteration",
            "asked to stop before the first iteration began: it ends now, and there is nothing to save\n",
        ),
    ],
)
def test_a_process_that_is_asked_to_stop_tidies_and_ends_at_once_before_an_iteration_and_after_its_grace_in_one(
    has_begun, grace, reason, said, monkeypatch, capsys
):
    ended = []

    def tidy(error):
        ended.append(str(error))
        raise OSError("the terminal is gone")

    def leave(code):
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    request = StopRequest(grace, tidy)
    if has_begun:
        request.begin()
    request._writer.send(bytes([signal.SIGTERM]))
    with pytest.raises(SystemExit):
        request._listen()
    assert ended == [reason, 143]
    lines = capsys.readouterr().err
    assert f"megatron_rl: asked to stop: {said}" in lines or lines == f"megatron_rl: {said}"
    assert ("0 s of grace are over" in lines) == has_begun


@pytest.mark.parametrize(
    ("limits", "seconds", "ends"),
    [
        (LoopConfig(exit_interval=3), [1e9] * 7, [3, 6]),
        (LoopConfig(exit_minutes=2), [119.0, 120.0, 120.5], [3]),
        # A run without limits does not ask how old it is.
        (LoopConfig(), [], []),
    ],
)
def test_a_run_ends_at_a_multiple_of_iterations_or_after_the_one_in_which_it_gets_too_old(
    limits: LoopConfig, seconds: list[float], ends: list[int]
) -> None:
    course = Course(0, 9, StopRequest(1.0, lambda reason: None), limits, iter(seconds).__next__)
    assert [version for version in range(1, 1 + (len(seconds) or 3)) if course.is_over(version)] == ends
