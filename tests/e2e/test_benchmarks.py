"""Every benchmark runs at its smallest size, and measures the keys that its table promises."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import gpu_bench, trl
from benchmarks.__main__ import BENCHMARKS, Outcome, record, run
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.tables import TABLES, read_rows
from tests.e2e.forked import ForkedProcess
from tests.ranks import ROOT

# Parts of the benchmark for GPUs, and their tables.
KERNELS = ("attention", "output_layer", "kernels")
OF_KERNELS = (*KERNELS, "launches")

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(600)]

# Keys of sizes and loads that a tiny run leaves out.
LEFT_OUT = {
    "publish": {"seconds", "vs"},
    "delivery": {"gb_s_2", "gb_s_4"},
    "overlap": {"ratio_gen_half", "ratio_gen_double"},
    "contention": {"vllm_kept_gen_double", "steps_kept_gen_double", "vllm_kept_plain_gen_double"},
    "sidecar": {"service_vs_offline_40m"},
    "trace": {"engine_vs"},
    "trl": {"vs_trl_10m", "vs_trl_40m", "vs_colocated", "default_vs_pinned"},
}
# Benchmarks that are run as `python -m benchmarks` runs them. The others are forked: their imports take seconds.
STARTED = {
    "drafts",
    "conversations",
    "dynamic_sampling",
    "tails",
    "in_flight",
    "delivery",
    "step_ledger",
    "log_probs_memory",
    "precision",
    "batch_invariant",
}
# What each change runs: a benchmark of each kind that starts no engine.
FAST = {"weights", "checkpoints", "publish", "sidecar", "conversations", "control_plane", "trimodel", "shared_prompt"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in BENCHMARKS]
)
def test_a_tiny_run_of_a_benchmark_gives_the_figures_that_are_documented(name, tmp_path):
    if name in STARTED:
        outcome = run(name, is_tiny=True)
        assert outcome.code == 0
        figures = outcome.figures
    else:
        figures = run_forked(name, tmp_path)
    left_out = {key for key in BENCHMARKS[name] if key.startswith(tuple(LEFT_OUT.get(name, ())))}
    assert set(figures) == set(BENCHMARKS[name]) - left_out
    assert all(figure >= 0 for figure in figures.values())


def run_forked(name: str, folder: Path) -> Mapping[str, float]:
    """Run a benchmark in a process that has imported megatron, and return its figures."""
    output = folder / "output"
    # The benchmark itself is not a rank.
    prologue = "import os; del os.environ['RANK']"
    process = ForkedProcess(
        ROOT / "benchmarks" / f"{name}.py", ["--tiny"], prologue, output, {**os.environ, "RANK": "0"}
    )
    try:
        assert process.wait() == 0, output.read_text()
    finally:
        process.kill()
    return json.loads(output.read_text().splitlines()[-1])


@pytest.mark.slow
def test_a_tiny_run_on_the_cpu_completes_every_part_of_the_benchmark_for_gpus(tmp_path):
    # The same part with other models would start as many engines again; tests/unit/test_gpu_bench.py runs the kernels'.
    names = ["step_0.6b", "start", "service", "publish_8b"]
    assert {PARTS[name].module for name in names} == {part.module for part in PARTS.values()} - {*KERNELS, "rival"}
    assert gpu_bench.main([*names, "--tiny", "--minutes", "60", "--folder", str(tmp_path / "bench")]) == 0
    rows = {name: read_rows(gpu_bench.find_rows(tmp_path / "bench", name)) for name in names}
    for name in names:
        assert {row.table for row in rows[name]} == set(PARTS[name].tables)
    assert all(set(row.figures) == set(TABLES[row.table].figures) for some in rows.values() for row in some)
    page = (tmp_path / "bench" / "RESULTS-GPU.md").read_text()
    assert all(f"| {name} | complete |" in page for name in names)
    assert all(f"## {TABLES[table].title}" in page for table in TABLES.keys() - {*OF_KERNELS, "rival"})


@pytest.mark.slow
def test_a_tiny_run_on_the_cpu_compares_whole_iterations_with_trl(tmp_path):
    trl.make_environment()
    assert gpu_bench.main(["rival", "--tiny", "--minutes", "60", "--folder", str(tmp_path / "bench")]) == 0
    (row,) = read_rows(gpu_bench.find_rows(tmp_path / "bench", "rival"))
    assert set(row.figures) == set(TABLES["rival"].figures)
    assert row.figures["vs_trl"] == pytest.approx(row.figures["theirs"] / row.figures["ours"])
    assert row.figures["tokens"] == pytest.approx(4 * 2 * 2 / row.figures["ours"])


def test_the_page_of_results_keeps_the_last_outcome_of_each_with_its_circumstances(tmp_path):
    record(
        [Outcome("weights", 30, {"import_vs_copy": 9.0}, 0, "an old machine"), Outcome("step", 5, {}, 1, "X")], tmp_path
    )
    record([Outcome("weights", 90, {"import_vs_copy": 1.25, "export_vs_copy": 0.5}, 0, "commit abc")], tmp_path)
    page = (tmp_path / "RESULTS.md").read_text()
    for words in (
        "| `import_vs_copy` | 1.25 |",
        "1.5 minutes on commit abc",
        "It failed: exit code 1.",
        "(results.svg)",
    ):
        assert words in page
    assert "an old machine" not in page
    assert "import of 1 B parameters" in (tmp_path / "results.svg").read_text()
