"""The end of a rank that no other rank joins: by itself, with a message."""

import os
from pathlib import Path

import pytest

from tests.e2e.forked import ForkedProcess
from tests.ranks import free_port

pytestmark = pytest.mark.each_change

PROGRAM = """
import datetime
from megatron_rl import platforms
platforms.select("cpu").install()
from megatron_rl.trainer.mcore.session import ParallelSizes, Session
Session(ParallelSizes(), platforms.select("cpu"), seed=1, timeout=datetime.timedelta(seconds=2))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_meets_no_other_says_for_how_long_it_waited(rank: int, tmp_path: Path) -> None:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script, output = tmp_path / "program.py", tmp_path / "output"
    script.write_text(PROGRAM)
    process = ForkedProcess(script, [], "", output, {**os.environ, **place})
    try:
        assert process.wait(600) != 0
    finally:
        process.kill()
    assert f"rank {rank} has not met the others within 2 s" in output.read_text()
