"""Every benchmark runs, with as little as there is, and says what its table of keys promises."""

import pytest

from benchmarks.__main__ import BENCHMARKS, Outcome, describe, draw, run

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(600)]

# Of sizes and loads that a tiny run leaves out.
LEFT_OUT = {
    "publish": {"seconds", "vs"},
    "overlap": {"ratio_gen_half", "ratio_gen_double"},
    "sidecar": {"service_vs_offline_40m"},
    "trl": {"vs_trl_10m", "vs_trl_40m", "vs_colocated"},
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_tiny_run_of_a_benchmark_gives_the_figures_that_are_documented(name):
    outcome = run(name, is_tiny=True)
    assert outcome.code == 0
    left_out = {key for key in BENCHMARKS[name] if key.startswith(tuple(LEFT_OUT.get(name, ())))}
    assert set(outcome.figures) == set(BENCHMARKS[name]) - left_out
    assert all(figure >= 0 for figure in outcome.figures.values())


def test_the_page_of_results_names_machine_commit_and_every_figure(tmp_path):
    outcomes = [
        Outcome("weights", 90, {"import_vs_copy": 1.25, "export_vs_copy": 0.5}, 0),
        Outcome("sidecar", 5, {}, 1),
    ]
    page = describe(outcomes, "picture.svg")
    for words in ("- machine: ", "- commit: ", "| `import_vs_copy` | 1.25 |", "1.5 minutes", "It failed: exit code 1."):
        assert words in page
    draw(outcomes, tmp_path / "picture.svg")
    assert "import of 1 B parameters" in (tmp_path / "picture.svg").read_text()
