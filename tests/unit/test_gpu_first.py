"""`make gpu-first`: it ends at the first missing device, and what is cut off leaves the results of earlier parts."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_bench, gpu_first
from benchmarks.gpu.parts import PARTS as MEASURED

pytestmark = pytest.mark.each_change


def test_all_parts_have_twelve_minutes_and_measurements_the_least_that_they_need() -> None:
    assert sum(part.seconds for part in gpu_first.PARTS.values()) <= 720
    for name in ("step_0.6b", "step_4b", "attention"):
        assert gpu_first.PARTS[name].seconds >= MEASURED[name].seconds


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu-first runs all parts")
def test_without_a_gpu_it_runs_up_to_the_first_part_that_needs_one_and_says_so(tmp_path: Path, capfd) -> None:
    assert gpu_first.main(["packages", "kernels", "demo", "--folder", str(tmp_path)]) == 3
    found = json.loads((tmp_path / gpu_first.FILE).read_text())
    assert found.keys() == {"packages", "kernels"}
    assert found["packages"]["state"] == "complete"
    assert f"torch {torch.__version__.partition('+')[0]}" in found["packages"]["packages"]
    assert (found["kernels"]["state"], found["kernels"]["exit"]) == ("failed", 3)
    assert "kernels needs a GPU" in capfd.readouterr().err


KEEPS_AND_FAILS = (
    "import pathlib; pathlib.Path('{0}/kernels.json').write_text('{{\"so far\": 1}}'); raise SystemExit(1)"
)


def test_results_are_whole_after_each_part_whatever_the_next_one_does(tmp_path: Path, monkeypatch) -> None:
    codes = {"kernels": KEEPS_AND_FAILS, "demo": "import time; time.sleep(3600)", "drift": "pass"}
    kept, write = [], gpu_first.write_aside

    def write_and_keep(path: Path, content: object) -> None:
        write(path, content)
        kept.append(json.loads(path.read_text()))

    def make_command(name: str, folder: Path) -> list[str]:
        return [sys.executable, "-c", codes[name].format(folder)]

    monkeypatch.setattr(gpu_first, "make_command", make_command)
    monkeypatch.setattr(gpu_first, "write_aside", write_and_keep)
    # The demo's time is over as soon as it is awaited.
    monkeypatch.setattr(gpu_bench, "await_end", lambda one, _: None if "sleep" in one.args[-1] else one.wait())
    assert gpu_first.main([*codes, "--folder", str(tmp_path), "--minutes", "60"]) == 1
    first, second, third = kept
    assert first["kernels"]["state"] == "failed"
    assert first["kernels"]["so far"] == 1
    assert second.keys() == {"kernels", "demo"}
    assert second["demo"]["state"].startswith("cut short after")
    assert third["drift"]["state"] == "complete"
    assert not (tmp_path / gpu_first.FILE).with_suffix(".unfinished").exists()
