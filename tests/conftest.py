"""Set up what all tests share."""

import atexit
import gc
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from megatron_rl import platforms
from megatron_rl.platforms import KNOWN_WARNINGS
from tests import nursery

# What a reason for a skip must have.
_TARGET = re.compile(r"\bmake (test-[a-z-]+)")
_OF_THE_MACHINE = re.compile(r"\bthis (host|kernel|machine|user)\b")
_OF_ALL_TESTS = re.compile(r"^pytestmark = .*\beach_change\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Install the platform first: any test module may import megatron, which must not happen before."""
    # For the processes that tests start: an OpenMP thread that spins until the next loop takes a core from others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    platforms.select("cpu").install()
    # Models are small, and other tests run beside these: two threads would wait for each other more than they compute.
    # A test says so where their number may matter, and `make test-anywhere` sets it for all.
    torch.set_num_threads(nursery.NUM_THREADS)
    # pytest has filters of its own for each test.
    for message in KNOWN_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")
    # An example's time depends on the machine's load.
    hypothesis.settings.register_profile("without_deadline", deadline=None)
    hypothesis.settings.load_profile("without_deadline")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file that has none of the tests that `make` asks for, before its imports take their time."""
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    asked, text = config.option.markexpr, collection_path.read_text(encoding="utf-8")
    is_left_out = {
        "each_change and not slow": "each_change" not in text,
        "not each_change and not slow": _OF_ALL_TESTS.search(text) is not None,
    }
    # None leaves the decision to others.
    return is_left_out.get(asked) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check that a test of each change has its marker in its own file, where `pytest_ignore_collect` looks for it."""
    for path in {item.path for item in items if item.get_closest_marker("each_change")}:
        if "each_change" not in path.read_text(encoding="utf-8"):
            raise pytest.UsageError(f"{path}: write the marker each_change in this file, not in another one")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", help="the target of make that runs these tests: what only it runs must not be skipped")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    return _fail_if_it_must_run(collector.config, (yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, Any]:
    return _fail_if_it_must_run(item.config, (yield))


def _fail_if_it_must_run(config: pytest.Config, report: Any) -> Any:
    """Let a skip fail unless its reason names another target that runs the test, or what this machine lacks."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2])
        targets = _TARGET.findall(reason)
        if config.getoption("--target") in targets or not (targets or _OF_THE_MACHINE.search(reason)):
            report.outcome = "failed"
            report.longrepr = (
                f"{reason}: this must run here, or name what runs it (make test-...), or what this host lacks"
            )
    return report


def pytest_collection_finish() -> None:
    """Let collections of garbage, which pytest and tests ask for, pass over all that was imported, until the end."""
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one worker, and all tests that may share the session's vLLM server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "sidecar" if nodeid.startswith("tests/sidecar/") else super()._split_scope(nodeid)

    return Scheduler(config, log)
