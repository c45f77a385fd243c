"""The invariants of megatron_rl/sidecar/in_flight/curve.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight.curve import GroupLife, Point, fit_curve, read_points
from megatron_rl.sidecar.in_flight.forecast import Opening
from tests.paced_run import Case, build_line, run_paced

POINTS = st.lists(
    st.builds(Point, st.floats(1, 500), st.floats(1e-3, 10), st.integers(1, 1000)), min_size=1, max_size=20
)


@given(POINTS)
def test_a_step_with_more_responses_takes_at_least_as_long(points: list[Point]) -> None:
    numbers = np.geomspace(0.5, 1000, 200)
    seconds = fit_curve(points).step_seconds(numbers)
    assert (seconds > 0).all()
    assert (np.diff(seconds) >= -1e-9 * seconds[1:]).all()


def test_the_time_between_two_known_numbers_lies_on_the_line_between_theirs() -> None:
    curve = fit_curve([Point(10, 1.0, 5), Point(30, 1.0, 5), Point(30, 4.0, 5), Point(100, 9.0, 5)])
    assert curve.nums == (10, 30, 100)
    assert curve.seconds == (1.0, 2.5, 9.0)
    assert curve.step_seconds(np.array([20.0, 65.0])) == pytest.approx([1.75, 5.75])


def test_the_time_outside_of_the_known_numbers_lies_on_the_line_that_fits_all_best() -> None:
    curve = fit_curve([Point(n, 2 + 0.1 * n, 5) for n in (20, 40, 80)])
    assert curve.step_seconds(np.array([1.0, 5.0, 160.0])) == pytest.approx([2.1, 2.5, 18.0])


def test_one_known_number_shows_no_cost_of_running_fewer_responses() -> None:
    curve = fit_curve([Point(100, 2.0, 5)])
    assert curve.step_seconds(np.array([25.0, 50.0, 200.0])) == pytest.approx([0.5, 1.0, 4.0])


@pytest.mark.parametrize("in_flight", [4, 12, 32])
def test_points_of_a_run_lie_on_the_curve_of_its_engine(in_flight: int) -> None:
    costs = StepCosts(0.05, 0.002, max_running=32)
    lives = _run(costs, in_flight)
    points = read_points(lives, costs.max_running)
    assert len(points) == len(lives)
    for point in read_points(lives, costs.max_running, fit_curve(points)):
        true = costs.step + costs.per_response * point.num_running
        assert point.seconds == pytest.approx(true, rel=0.03)


@pytest.mark.parametrize("step", [0.01, 1.0])
def test_points_lie_on_the_curve_also_while_the_first_groups_begin_one_after_another(step: float) -> None:
    """Read lives in which the number of responses grows: their steps are longer at the end than at the beginning."""
    costs = StepCosts(step, 0.02, max_running=96)
    case = Case(costs, num_prompts=24, group_size=4, lengths=(100, 100), train_seconds=0.0)
    lives: list[GroupLife] = []
    run_paced(case, 1, Opening(96, 1.0, tuple(5.0 * place for place in range(24))), lives.append)
    for known, error in ((None, 0.2), (build_line(step, 0.02, 96), 0.01)):
        for point in read_points(lives, costs.max_running, known):
            assert point.seconds == pytest.approx(step + 0.02 * point.num_running, rel=error)


def test_a_group_that_may_have_waited_in_its_engine_shows_nothing() -> None:
    costs = StepCosts(0.05, 0.002, max_running=16)
    lives = _run(costs, 32)
    points = read_points(lives, costs.max_running)
    assert 0 < len(points) < len(lives) / 2
    assert fit_curve(points).step_seconds(np.array([16.0])) == pytest.approx(0.05 + 16 * 0.002, rel=0.03)


def test_each_engine_is_read_by_itself() -> None:
    lives = [GroupLife(engine, 0.0, 10.0, (100, 100), 0) for engine in ("engine-0", "engine-1")]
    assert [point.num_running for point in read_points(lives, 8)] == pytest.approx([2.0, 2.0])


def test_a_line_has_the_costs_that_it_was_built_from() -> None:
    assert build_line(1.0, 0.5, 64).step_seconds(np.array([0.5, 1, 10, 100])) == pytest.approx([1.25, 1.5, 6, 51])


def _run(costs: StepCosts, in_flight: int) -> list[GroupLife]:
    case = Case(costs, num_prompts=24, group_size=4, lengths=(20, 100), train_seconds=0.0)
    lives: list[GroupLife] = []
    run_paced(case, 1, Opening(in_flight), lives.append)
    return lives
