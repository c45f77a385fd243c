"""The invariants of megatron_rl/sidecar/in_flight/choice.py."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.sidecar.in_flight.curve import Point, StepCurve, fit_curve
from megatron_rl.sidecar.in_flight.forecast import WORTH, Opening, SamplingWork, choose, list_numbers, predict
from tests.paced_run import build_line

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
