"""The helper that runs a function on several ranks: it returns, shows the reason of a failure, and never hangs."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RanksError, run_ranks


def reduced_rank(offset):
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return dist.get_rank(), value, torch.get_num_threads(), os.environ["LOCAL_RANK"]


def fail_on_rank_one():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("the reason on rank one")
    dist.barrier()


def hang_on_rank_zero():
    if os.environ["RANK"] == "0":
        where_it_hangs()


def where_it_hangs():
    time.sleep(600)


def die_on_rank_one(folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(f"{folder}/{os.environ['RANK']}", "w", encoding="ascii") as file:
        file.write(f"{os.getpid()} {child.pid}")
    if os.environ["RANK"] == "1":
        while not os.path.exists(f"{folder}/0"):
            time.sleep(0.01)
        os.kill(os.getpid(), 11)
    time.sleep(600)


def test_ranks_talk_to_each_other_and_return_their_values_in_order():
    results = run_ranks(reduced_rank, 2, 10)
    assert [rank for rank, *_ in results] == [0, 1]
    assert [value.item() for _, value, *_ in results] == [21.0, 21.0]
    assert [(threads, local) for *_, threads, local in results] == [(1, "0"), (1, "1")]


def test_the_traceback_of_the_rank_that_failed_first_comes_first():
    with pytest.raises(RanksError) as error:
        run_ranks(fail_on_rank_one, 2)
    text = str(error.value)
    assert text.startswith("rank 1 of 2 failed")
    assert "ValueError: the reason on rank one" in text
    assert 'raise ValueError("the reason on rank one")' in text


def test_a_rank_that_hangs_is_ended_at_the_deadline_and_shown_where_it_was():
    with pytest.raises(RanksError) as error:
        run_ranks(hang_on_rank_zero, 2, timeout=6)
    assert "after 6 seconds rank 0 of 2 had not finished" in str(error.value)
    assert "where_it_hangs" in str(error.value)


def test_no_process_is_left_when_a_rank_dies_of_a_signal(tmp_path):
    with pytest.raises(RanksError, match="rank 1 of 2 failed:\nended by SIGSEGV"):
        run_ranks(die_on_rank_one, 2, str(tmp_path))
    for rank in ("0", "1"):
        for process in (tmp_path / rank).read_text().split():
            assert _ends(int(process)), f"process {process} of rank {rank} is left"


def _ends(process, seconds=5.0):
    """Wait until a process is gone, or a zombie that waits for its parent; return False after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{process}/stat", encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False
