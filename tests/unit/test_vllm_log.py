"""The log of a vLLM server: why it ended, and how long the parts of its start took."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

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
    find_cause,
    measure_server,
)

LOGS = Path(__file__).parents[1] / "sidecar" / "vllm_logs"
WORKER = "(Worker_TP{} pid=7{}) ERROR 11-22 07:43:{} [multiproc_executor.py:1063] {}"


def lines_of(name: str) -> list[str]:
    return (LOGS / f"{name}.log").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        (
            "unsupported_head",
            "in its worker:",
            "RuntimeError: Unsupported CPU attention configuration: head_dim=16 isa=2 kv_cache_idx=0",
        ),
        ("no_memory", "in its worker:", "less than requested memory for kv (4000.0 GiB)"),
        ("heads_not_divided", "in its server:", "attention heads (8) must be divisible by tensor parallel size (3)"),
        ("no_vllm", "in its server:", "ModuleNotFoundError: No module named 'vllm'"),
    ],
)
def test_the_cause_is_the_innermost_process_error_with_its_last_frames(name: str, first: str, last: str) -> None:
    found = find_cause(lines_of(name))
    assert found.splitlines()[0] == first
    assert last in found
    assert found.count('  File "') + found.count("  File <") == 2
    assert "see stack trace" not in found.lower()
    assert "^^^^" not in found
    assert len(found.splitlines()) <= 10


TRACEBACK = "Traceback (most recent call last):"
OF_WORKERS = {
    0: [TRACEBACK, '  File "a.py", line 1, in f', "    f()", "KeyError: 'the cause'"],
    1: [TRACEBACK, '  File "b.py", line 2, in g', "    g()", "ConnectionError: peer"],
}
SURVIVED = [
    *(WORKER.format(0, 0, "06", text) for text in (TRACEBACK, "KeyError: 'a request'")),
    *(
        f"(APIServer pid=1) WARNING 11-22 07:49:06 [base.py:380] {text}"
        for text in (TRACEBACK, "ValueError: no template")
    ),
    "(APIServer pid=1) INFO 11-22 07:49:06 [loggers.py:1] Engine 000: 4 tokens/s",
    "Killed",
]
DEATH = "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor."
OF_CORE = [TRACEBACK, '  File "core.py", line 9, in step', "vllm.v1.engine.exceptions.EngineDeadError: of the core"]
USAGE = [
    *(f"  [--flag-{number}]" for number in range(300)),
    "vllm_main.py: error: unrecognized arguments: --no-such-flag",
]


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            [WORKER.format(rank, rank, "06", OF_WORKERS[rank][line]) for line in range(4) for rank in (0, 1)],
            ["in its worker:", *OF_WORKERS[0][1:]],
        ),
        (
            [
                f"(EngineCore pid=5) ERROR 11-22 07:43:06 [multiproc_executor.py:300] {text}"
                for text in (DEATH, *OF_CORE)
            ],
            ["in its core:", DEATH, *OF_CORE[1:]],
        ),
        (SURVIVED, SURVIVED),
        (USAGE, USAGE[-10:]),
        ([], []),
    ],
    ids=["the first of two workers", "a killed worker", "no error of the last minute", "no traceback", "nothing"],
)
def test_the_cause_is_what_failed_first_or_else_the_last_lines(log: list[str], cause: list[str]) -> None:
    assert find_cause(log).splitlines() == cause


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
