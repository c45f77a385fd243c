"""Tests that are skipped: each reason says what runs the test, and no target skips what only it runs."""

from types import SimpleNamespace

import pytest

from tests.conftest import _fail_if_it_must_run


@pytest.mark.parametrize(
    ("reason", "target", "outcome"),
    [
        ("TRL has an environment of its own: make test-trl", None, "skipped"),
        ("TRL has an environment of its own: make test-trl", "test-verifiers", "skipped"),
        ("TRL has an environment of its own: make test-trl", "test-trl", "failed"),
        ("this host has no IPv6", None, "skipped"),
        ("this host has no IPv6", "test-hosts", "skipped"),
        # pytest.importorskip says this by itself.
        ("could not import 'peft': No module named 'peft'", None, "failed"),
        ("it is hard to set up", None, "failed"),
    ],
)
def test_a_skip_fails_where_the_test_must_run_or_its_reason_names_nothing_that_runs_it(reason, target, outcome):
    report = pytest.CollectReport("tests/x.py", "skipped", ("tests/x.py", 3, f"Skipped: {reason}"), [])
    config = SimpleNamespace(getoption={"--target": target}.get)
    assert _fail_if_it_must_run(config, report).outcome == outcome
