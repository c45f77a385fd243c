"""What all tests share."""

from typing import Any

import hypothesis
import pytest
import torch

from megatron_rl import platforms
from megatron_rl.platforms import KNOWN_WARNINGS


def pytest_configure(config: pytest.Config) -> None:
    """Any test module may import megatron, which must not happen before its platform is there."""
    platforms.select("cpu").install()
    # Models are small, and other tests run beside these: two threads would wait for each other more than they compute.
    # Where their number may matter, a test says it.
    torch.set_num_threads(1)
    # pytest has filters of its own for each test.
    for message in KNOWN_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    # How long an example takes is the machine's load.
    hypothesis.settings.register_profile("without_deadline", deadline=None)
    hypothesis.settings.load_profile("without_deadline")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For several workers: a file's tests stay together, and so do all that may share the session's vLLM server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "sidecar" if nodeid.startswith("tests/sidecar/") else super()._split_scope(nodeid)

    return Scheduler(config, log)
