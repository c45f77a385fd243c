"""The invariants of in_flight/curve.py and in_flight/forecast.py, against a service in virtual time and a bound."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.in_flight import bound_seconds
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight.curve import GroupLife, Point, StepCurve, fit_curve, read_points
from megatron_rl.sidecar.in_flight.forecast import (
    PACES,
    WORTH,
    Opening,
    SamplingWork,
    choose,
    list_numbers,
    plan_ends,
    predict,
)
from tests.paced_run import Case, build_line, run_paced

CASE = Case(StepCosts(0.05, 0.002, max_running=32), num_prompts=24, group_size=4, lengths=(20, 100), train_seconds=20)
CURVE = build_line(CASE.costs.step, CASE.costs.per_response, CASE.costs.max_running)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train_seconds": 80.0},
        {"train_seconds": 1.0},
        {"order": "prompt"},
        {"order": "prompt", "groups_per_slot": 4},
        {"num_updates": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("in_flight", [4, 16, 32, 64])
def test_a_forecast_comes_true_to_the_last_step(changes: dict, in_flight: int) -> None:
    case = dataclasses.replace(CASE, **changes)
    (one,) = run_paced(case, 1, Opening(in_flight))
    assert predict(_work(case, one.lengths), CURVE, in_flight).trained == pytest.approx(one.seconds, rel=1e-3)


@pytest.mark.parametrize("pace", [0.5, 1.0])
@pytest.mark.parametrize("changes", [{"lengths": (60, 60)}, {"num_engines": 2, "lengths": (60, 60)}, {}], ids=str)
def test_a_forecast_of_groups_at_a_pace_comes_true(changes: dict, pace: float) -> None:
    case = dataclasses.replace(CASE, **changes)
    (at_once,) = run_paced(case, 1, Opening(32))
    forecast = predict(_work(case, at_once.lengths), CURVE, 32, pace)
    delays, limits = forecast.opening.delays, forecast.opening.limits
    assert list(delays) == sorted({*delays})
    assert len(limits) == case.num_prompts // case.num_engines
    assert 1 < max(limits) <= 8
    (one,) = run_paced(case, 1, forecast.opening)
    assert one.lengths == at_once.lengths
    assert forecast.trained == pytest.approx(one.seconds, rel=1e-3)


def test_an_engine_has_room_by_the_groups_begun_and_the_delays_that_are_over() -> None:
    opening = Opening(16, 1.0, limits=(1, 2, 3, 2), delays=(0.0, 1.0, 2.5))
    rooms = {(1, 1): 4, (1, 2): 8, (2, 2): 8, (2, 3): 12, (3, 3): 8}
    assert {asked: opening.count_room(*asked, group_size=4) for asked in rooms} == rooms
    # Groups that were not planned for, such as those of a lost engine, have all room.
    assert opening.count_room(4, 3, group_size=4) == 16
    assert Opening(16).count_room(0, 0, group_size=4) == 16


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_planned_groups_end_as_far_apart_as_the_trainer_takes_for_one(load: float) -> None:
    count, steps, running = 32, 50.0, 4.0
    curve = build_line(1.0, 0.1, 200)
    apart = load * steps * (1 + 0.1 * running * count) / count
    begins = _begin_at_pace(count, steps, running, apart, curve)
    ends = np.array(begins) + steps
    changes = np.sort(np.concatenate([begins, ends]))
    alive = [(np.array(begins) <= at).sum() - (ends <= at).sum() for at in changes[:-1]]
    seconds = np.concatenate([[0.0], np.cumsum(np.diff(changes) * (1 + 0.1 * running * np.array(alive)))])
    assert begins[0] == 0
    np.testing.assert_allclose(np.diff(np.interp(ends, changes, seconds)), apart, rtol=1e-6)


def _begin_at_pace(count: int, steps: float, running: float, apart: float, curve: StepCurve) -> list[float]:
    return [end - steps for end in plan_ends(count, steps, apart, curve.step_seconds(running * np.arange(count + 1)))]


def test_engines_share_the_groups() -> None:
    lengths = [[50] * 4] * 16
    alone = predict(SamplingWork(lengths[:8], 32), CURVE, 16)
    shared = predict(SamplingWork(lengths, 32, num_engines=2), CURVE, 16)
    assert (shared.first, shared.sampled) == (alone.first, alone.sampled)


def test_a_trainer_that_waits_for_all_groups_costs_the_forecast_no_time() -> None:
    forecast = predict(SamplingWork([[50] * 4] * 16, 32), CURVE, 16)
    assert forecast.trained == forecast.sampled


def _work(case: Case, lengths: list[list[int]]) -> SamplingWork:
    return SamplingWork(
        lengths, case.costs.max_running, case.num_engines, case.groups_per_slot, case.num_updates,
        case.order == "prompt", case.train_seconds,
    )  # fmt: skip


def test_the_time_of_a_forecast_is_a_sum_over_steps() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, (6, 3)).tolist()
    forecast = predict(SamplingWork(lengths, 9), CURVE, 9)
    assert forecast.sampled == pytest.approx(_step_by_step(lengths, 3))


def _step_by_step(lengths: list[list[int]], num_at_once: int) -> float:
    """Sum the seconds of every step, the naive way."""
    waiting, live, seconds = [list(group) for group in lengths], [], 0.0
    while waiting or live:
        while waiting and len(live) < num_at_once:
            live.append(waiting.pop(0))
        seconds += 0.05 + 0.002 * sum(left > 0 for group in live for left in group)
        live = [[left - 1 for left in group] for group in live]
        live = [group for group in live if max(group) > 0]
    return seconds


WORKS = st.builds(
    SamplingWork,
    lengths=st.lists(st.lists(st.integers(1, 60), min_size=3, max_size=3), min_size=1, max_size=24),
    max_running=st.integers(1, 60),
    num_engines=st.integers(1, 3),
    groups_per_turn=st.integers(1, 4),
    in_prompt_order=st.booleans(),
    train_seconds=st.floats(0, 1000),
)
CURVES = st.builds(
    fit_curve,
    st.lists(st.builds(Point, st.floats(1, 60), st.floats(1e-2, 1), st.integers(1, 99)), min_size=1, max_size=5),
)


def test_the_numbers_to_choose_from_are_the_bound_and_whole_groups_below_it() -> None:
    assert list_numbers(8, 64, 100) == [64, 48, 40, 32, 24, 16, 8]
    assert list_numbers(8, 60, 3) == [60, 16, 8]
    assert list_numbers(8, 5, 3) == [5]


@settings(max_examples=60, deadline=None)
@given(WORKS, CURVES, st.integers(1, 120))
def test_a_choice_is_among_the_numbers_and_tries_at_least_half_of_the_least_known_one(
    work: SamplingWork, curve: StepCurve, most: int
) -> None:
    forecast = choose(work, curve, most, Opening(most))
    opening = forecast.opening
    assert opening.pace or opening.num_in_flight in list_numbers(3, most, len(work.lengths))
    if opening.num_in_flight != most:
        assert 2 * min(opening.num_in_flight, work.max_running) >= curve.least_known
    if opening.pace:
        assert min(opening.num_in_flight, work.max_running) >= curve.least_known
        assert all(2 * 3 * limit >= curve.least_known for limit in opening.limits[len(opening.delays) :])
    assert forecast.trained <= predict(work, curve, most).trained


@settings(max_examples=60, deadline=None)
@given(WORKS, CURVES, st.integers(3, 120))
def test_an_opening_is_kept_unless_another_is_better_by_more_than_it_is_worth(
    work: SamplingWork, curve: StepCurve, most: int
) -> None:
    current = Opening(min(most, 9))
    now = predict(work, curve, current.num_in_flight).trained
    forecast = choose(work, curve, most, current)
    assert (forecast.opening != current) == (forecast.trained < (1 - WORTH) * now)


@settings(max_examples=60, deadline=None)
@given(WORKS, CURVES, st.integers(3, 120), st.sampled_from([0.7, 0.95, 1.05, 1.3]))
def test_a_pace_is_kept_unless_another_opening_is_better_by_more_than_it_is_worth(
    work: SamplingWork, curve: StepCurve, most: int, pace: float
) -> None:
    now = predict(work, curve, most, pace, math.ceil(curve.least_known / 2 / work.group_size))
    forecast = choose(work, curve, most, now.opening)
    assert forecast == now or forecast.trained < (1 - WORTH) * now.trained


def test_a_trainer_that_waits_for_all_groups_gets_the_choice_that_samples_fastest() -> None:
    work = SamplingWork([[50] * 4] * 16, max_running=64)
    opening = choose(work, build_line(1.0, 0.1, 64), 128, Opening(8)).opening
    assert opening.num_in_flight >= 64
    assert opening.pace is None


def test_groups_that_fit_all_at_once_are_spread_where_that_costs_the_engine_little() -> None:
    work = SamplingWork([[100] * 8] * 32, max_running=256, train_seconds=2600.0)
    curve = build_line(0.5, 0.1, 256)
    forecast = choose(work, curve, 512, Opening(512))
    assert forecast.opening.num_in_flight < 128
    assert forecast.opening.pace
    assert forecast.trained < 0.62 * predict(work, curve, 512).trained


def test_groups_run_together_where_fewer_responses_take_as_long() -> None:
    work = SamplingWork([[100] * 8] * 32, max_running=256, train_seconds=100.0)
    opening = choose(work, build_line(1.0, 0.0, 256), 512, Opening(512)).opening
    assert opening.num_in_flight >= 256


CASES = st.builds(
    Case,
    costs=st.builds(StepCosts, st.floats(1e-3, 10), st.floats(1e-3, 1), st.just(10**6)),
    num_prompts=st.integers(1, 24),
    group_size=st.integers(1, 8),
    lengths=st.just((50, 50)),
    train_seconds=st.just(0.0) | st.floats(0.01, 2000),
)


@settings(max_examples=200, deadline=None)
@given(CASES, st.integers(0, 10**6), st.floats(0.0, 30.0))
def test_no_order_of_groups_takes_less_time_than_the_bound(case: Case, seed: int, spread: float) -> None:
    begins = np.random.default_rng(seed).integers(0, 1 + int(spread * 50), case.num_prompts)
    assert _seconds(case, begins) >= bound_seconds(case, 200) * (1 - 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.1, 3.0), st.floats(0.01, 1.0), st.floats(0.1, 60.0))
def test_the_best_of_all_orders_of_four_groups_is_not_below_the_bound(step: float, token: float, train: float) -> None:
    case = Case(StepCosts(step, token, 10**6), 4, 2, (4, 4), train)
    orders = itertools.combinations_with_replacement(range(13), 3)
    best = min(_seconds(case, np.array([0, *begins])) for begins in orders)
    assert bound_seconds(case) <= best * (1 + 1e-9)


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_groups_that_end_at_the_pace_of_the_trainer_are_within_2_percent_of_the_bound(load: float) -> None:
    count, length, step, token = 128, 100, 1.0, 0.03
    train = load * length * (step + token * 8 * count)
    case = Case(StepCosts(step, token, 10**6), count, 8, (length, length), train)
    curve = build_line(step, token, 8 * count)
    work = SamplingWork([[length] * 8] * count, 8 * count, train_seconds=train)
    assert min(predict(work, curve, 8 * count, pace).trained for pace in PACES) < 1.02 * bound_seconds(case)


def _seconds(case: Case, begins: np.ndarray) -> float:
    """Return the end of an iteration whose groups begin at these steps, with steps without any group left out."""
    length = case.lengths[1]
    order = np.argsort(np.concatenate([begins, begins + length]), kind="stable")
    steps = np.concatenate([begins, begins + length])[order]
    running = np.cumsum(np.repeat([case.group_size, -case.group_size], len(begins))[order])[:-1]
    costs = np.where(running > 0, case.costs.step + case.costs.per_response * running, 0.0)
    seconds = np.concatenate([[0.0], np.cumsum(np.diff(steps) * costs)])
    ends = np.sort(np.interp(begins + length, steps, seconds))
    left = case.num_prompts - np.arange(case.num_prompts)
    return float((ends + left * case.train_seconds / case.num_prompts).max())


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


def test_a_time_in_which_nothing_runs_shows_nothing() -> None:
    # The line of the curve goes through the origin: a step without responses would take no time.
    known = StepCurve(nums=(4.0, 8.0), seconds=(0.4, 0.8), line=(0.0, 0.1))
    lives = [GroupLife("engine-0", begun, begun + 4.0, (10, 10, 10, 10), 0, False) for begun in (0.0, 10.0)]
    points = read_points(lives, max_running=8, known=known)
    assert [(point.num_running, point.seconds) for point in points] == [(pytest.approx(4.0), pytest.approx(0.4))] * 2
