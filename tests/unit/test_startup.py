"""What a start costs beyond megatron's own import."""

import statistics
import subprocess
import sys
import time

from tests.processes import ROOT

_MEGATRON = """
import megatron.core.parallel_state, megatron.core.models.gpt, megatron.core.optimizer
import megatron.core.pipeline_parallel, megatron.core.distributed, megatron.core.dist_checkpointing
"""
# The CPU platform switches torch.compile off, which saves its import: what we add must not hide behind that.
_MEGATRON_ALONE = f"""
import torch
torch.compile = lambda function, **keywords: function
{_MEGATRON}
"""
_WITH_OURS = f"""
import importlib, pkgutil
from megatron_rl import platforms
platforms.select("cpu").install()
{_MEGATRON}
import megatron_rl
for module in pkgutil.walk_packages(megatron_rl.__path__, "megatron_rl."):
    if not module.name.startswith("megatron_rl.sidecar"):
        importlib.import_module(module.name)
"""
_NUM_PAIRS = 5


def test_starting_costs_less_than_a_second_over_megatrons_own_import():
    _seconds(_WITH_OURS)  # Whatever has to be compiled or read from disk for the first time is not ours to count.
    pairs = [(_seconds(_MEGATRON_ALONE), _seconds(_WITH_OURS)) for _ in range(_NUM_PAIRS)]
    added = statistics.median(ours - megatron for megatron, ours in pairs)
    assert added < 1.0, f"{added:.2f} s added; (megatron, with ours) were {pairs}"


def _seconds(code):
    """How long a process takes that runs the code and ends."""
    start = time.monotonic()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL
    )
    return time.monotonic() - start
