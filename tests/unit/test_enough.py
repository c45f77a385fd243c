"""The length that a run must have before `megatron-rl explain` judges it."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.analysis.explain import LEAST_ITERATIONS, LEAST_SECONDS, PRECISION, count_wanted
from megatron_rl.cli import main
from tests.observed import write_metrics
from tests.synthetic_run import write_trace


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        ([], 8),
        ([60.0] * 3, 8),
        # Four seconds in all.
        ([0.3] * 3, 14),
        ([0.3] * 100, 14),
        # Quartiles 6 and 14 around 10: the spread is 0.593, and 0.593 / 0.15 is 3.95.
        ([2.0, 6.0, 10.0, 14.0, 18.0], 16),
        # A checkpoint in every fifth iteration does not count as a spread.
        ([10.0, 10.0, 10.0, 10.0, 50.0] * 2, 8),
    ],
)
def test_short_iterations_and_those_that_differ_are_wanted_in_larger_numbers(seconds, wanted):
    assert count_wanted(seconds) == wanted


@given(st.lists(st.floats(1e-3, 1e3), min_size=4, max_size=40))
def test_the_required_number_of_iterations_is_long_enough_and_tells_their_mean(seconds):
    wanted, median = count_wanted(seconds), statistics.median(seconds)
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    assert wanted >= LEAST_ITERATIONS
    assert wanted * median >= LEAST_SECONDS * (1 - 1e-9)
    assert (third - first) / 1.349 / median / math.sqrt(wanted) <= PRECISION * (1 + 1e-9)
    # No more than each of the three bounds asks for.
    fewer = wanted - 1
    assert (
        wanted == LEAST_ITERATIONS
        or fewer * median < LEAST_SECONDS
        or (third - first) / 1.349 / median / math.sqrt(fewer) > PRECISION * (1 - 1e-9)
    )


def explain(folder, num_iterations, capsys):
    """Explain a run that waits without a reason, of equal rewards and truncated responses; return the output."""
    folder.mkdir()
    write_metrics(folder / "metrics.jsonl", range(num_iterations))
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics.replace('"loss"', '"groups": 1, "loss"'))
    write_trace(folder, num_iterations)
    assert main(["explain", str(folder)]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_of_few_iterations_is_not_judged_and_learns_how_many_are_wanted(tmp_path, capsys):
    assert explain(tmp_path / "four", 4, capsys) == [
        "note: too little to judge where the time went: it needs 8 iterations after the first, which warms up, and has "
        "3 of 1 s: train for longer (--train-iters)",
        "note: too little to judge the metrics: it needs 8 iterations, and has 4: train for longer (--train-iters)",
    ]
    # The metrics have enough before the trace has: its first iteration warms up.
    time, *metrics = explain(tmp_path / "eight", 8, capsys)
    assert "needs 8 iterations after the first, which warms up, and has 7 of 1 s, whose times spread by 0%" in time
    assert [line.partition(":")[0] for line in metrics] == ["no signal", "truncated"]


def test_a_run_of_enough_iterations_is_judged(tmp_path, capsys):
    names = [line.partition(":")[0] for line in explain(tmp_path / "nine", 9, capsys)]
    assert names == ["other", "no signal", "truncated"]
