"""The seconds of the parts of a vLLM server's start, from its processes and its log."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from megatron_rl.sidecar.vllm.server_log import (
    COMPILATION,
    CORE,
    GRAPHS,
    MODEL,
    SERVER,
    TRIAL,
    WARM_UP,
    describe_start,
    measure_server,
)

CORE_LINE = "(EngineCore pid=7) INFO 11-26 18:00:01 [file.py:1] "
LOG = [
    f"{CORE_LINE}Model loading took 1.12 GiB memory and 2.500000 seconds",
    f"{CORE_LINE}torch.compile took 4.00 s in total",
    f"{CORE_LINE}Graph capturing finished in 6 secs, took 0.50 GiB",
    f"{CORE_LINE}init engine (profile, create kv cache, warmup model) took 17.25 s (compilation: 4.00 s)",
]


def test_the_parts_follow_one_another_and_add_up_to_the_start():
    parts = describe_start(40.0, 9.0, 1.5, LOG)
    assert parts == {
        SERVER: 9.0, CORE: 11.25, MODEL: 2.5, COMPILATION: 4.0, GRAPHS: 6.0, WARM_UP: 7.25, TRIAL: 1.5,
    }  # fmt: skip
    assert sum(parts.values()) == 40.0 + 1.5


def test_of_several_workers_the_slowest_counts_and_unknown_phrases_leave_their_part_out():
    slower = LOG[0].replace("2.5", "3.5")
    assert describe_start(40.0, 9.0, 1.5, [LOG[0], slower])[MODEL] == 3.5
    assert describe_start(40.0, 9.0, 1.5, []) == {SERVER: 9.0, CORE: 31.0, TRIAL: 1.5}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_core_is_found_from_each_of_its_processes(depth):
    code = (
        "import os, sys, time\n"
        "time.sleep(0.5)\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    if os.fork():\n"
        "        os.wait()\n"
        "        sys.exit()\n"
        "print(os.getpid(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(depth)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdout is not None
        assert measure_server(int(server.stdout.readline())) >= 0.5
        server.communicate("")


def test_a_worker_that_has_ended_has_no_seconds():
    ended = multiprocessing.get_context("fork").Process(target=os.getpid)
    ended.start()
    ended.join()
    assert ended.pid is not None
    assert measure_server(ended.pid) == 0.0
