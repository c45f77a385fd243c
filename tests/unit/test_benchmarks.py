"""Benchmarks run: each in its tiny mode, whose figures mean nothing."""

import json
import subprocess
import sys

import pytest

from tests.processes import ROOT


@pytest.mark.each_change
@pytest.mark.parametrize(("name", "keys"), [("sidecar", {"ms_per_group_scripted", "gib_scripted"})])
def test_a_benchmark_runs_and_its_last_line_has_its_figures(name: str, keys: set[str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--tiny"], cwd=ROOT, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert set(figures) == keys
    assert all(figure > 0 for figure in figures.values())
