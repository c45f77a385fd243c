"""Set up what all tests share."""

from typing import Any

import hypothesis
import pytest
import torch

from megatron_rl import platforms
from megatron_rl.platforms import KNOWN_WARNINGS


def pytest_configure(config: pytest.Config) -> None:
    """Install the platform first: any test module may import megatron, which must not happen before."""
    platforms.select("cpu").install()
    # Models are small, and other tests run beside these: two threads would wait for each other more than they compute.
    # A test says so where their number may matter.
    torch.set_num_threads(1)
    # pytest has filters of its own for each test.
    for message in KNOWN_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    # An example's time depends on the machine's load.
    hypothesis.settings.register_profile("without_deadline", deadline=None)
    hypothesis.settings.load_profile("without_deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one worker, and all tests that may share the session's vLLM server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "sidecar" if nodeid.startswith("tests/sidecar/") else super()._split_scope(nodeid)

    return Scheduler(config, log)
