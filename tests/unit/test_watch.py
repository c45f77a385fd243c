"""One rank that fails ends all of them, with its reason."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from megatron_rl.training import watch
from megatron_rl.training.stop import StopRequest
from tests.ranks import ROOT

CODE = """
    import os, sys, time
    import torch.distributed as dist
    from megatron_rl.errors import InputError
    from megatron_rl.training.watch import Watch

    rank, what = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
    store = dist.distributed_c10d._get_default_store()
    with Watch(store, rank):
        dist.barrier()
        if rank == 1 and what == "error":
            raise InputError("row 7 has no prompt")
        if rank == 1 and what == "crash":
            raise ZeroDivisionError("division by zero")
        if what != "nothing":
            dist.barrier()
"""


def outcomes(tmp_path, what: str) -> tuple[list[int], list[str]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CODE), str(rank), what, str(tmp_path / "store")],
            cwd=ROOT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


def test_all_ranks_end_with_the_error_of_one_while_they_wait_for_it(tmp_path):
    codes, errors = outcomes(tmp_path, "error")
    assert codes == [4, 4]
    for text in errors:
        assert "megatron_rl: the run ended: row 7 has no prompt (rank 1)" in text


def test_a_crash_ends_all_ranks_and_only_its_own_shows_the_traceback(tmp_path):
    codes, errors = outcomes(tmp_path, "crash")
    assert codes == [1, 1]
    for text in errors:
        assert "the run ended: ZeroDivisionError: division by zero (rank 1)" in text
    assert "Traceback" in errors[1]


def test_a_run_without_a_failure_ends_as_it_would(tmp_path):
    assert outcomes(tmp_path, "nothing")[0] == [0, 0]


def test_an_interrupt_ends_a_rank_by_name_and_without_a_traceback(monkeypatch, capsys):
    class Store:
        def check(self, keys):
            return False

        def compare_set(self, key, expected, desired):
            return desired.encode()

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(watch, "_FAREWELL_SECONDS", 0)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="130"), watch.Watch(Store(), 3):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "megatron_rl: the run ended: interrupted (rank 3)\n"


def test_a_grace_that_runs_out_ends_the_process_once_it_is_tidied(monkeypatch):
    ended = []

    def tidy():
        ended.append("tidied")
        raise OSError("the terminal is gone")

    def leave(code):
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    request = StopRequest(0.0)
    request.tidy = tidy
    request._writer.send(bytes([signal.SIGTERM]))
    with pytest.raises(SystemExit):
        request._listen()
    assert ended == ["tidied", 143]
