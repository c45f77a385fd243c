"""The end of a rank that no other rank joins: by itself, with a message."""

import os
import subprocess
import sys

import pytest

from tests.ranks import ROOT, free_port

pytestmark = pytest.mark.each_change

PROGRAM = """
import datetime
from megatron_rl import platforms
platforms.select("cpu").install()
from megatron_rl.trainer.mcore.session import ParallelSizes, Session
Session(ParallelSizes(), platforms.select("cpu"), seed=1, timeout=datetime.timedelta(seconds=2))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_meets_no_other_says_for_how_long_it_waited(rank: int) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env={**os.environ, **place}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert ended.returncode != 0
    assert f"rank {rank} has not met the others within 2 s" in ended.stderr
