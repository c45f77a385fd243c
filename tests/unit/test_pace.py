"""Deadlines follow from measured times."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.sidecar.pace import FACTOR, NUM_KEPT, Pace

seconds = st.floats(0.001, 1e4)


@given(seconds)
def test_a_step_that_was_never_measured_has_all_the_time_of_its_configuration(most):
    assert Pace().deadline("load", most) == most


@given(st.lists(seconds, min_size=1, max_size=3 * NUM_KEPT), seconds, seconds)
def test_a_measured_step_has_ten_times_the_longest_of_the_last_within_its_bounds(measured, most, least):
    pace = Pace(least)
    for one in measured:
        pace.note("load", one)
    assert pace.deadline("load", most) == min(most, max(least, FACTOR * max(measured[-NUM_KEPT:])))
    assert pace.deadline("probe", most) == most


def test_a_duration_that_was_cut_off_gives_the_next_one_more_time():
    pace = Pace(least_seconds=30)
    pace.note("load", 1)
    assert pace.deadline("load", 600) == 30
    pace.note("load", 30)
    assert pace.deadline("load", 600) == 300


def test_a_duration_that_is_not_remembered_yet_counts_too():
    pace = Pace(least_seconds=1)
    pace.note("silence", 2)
    assert pace.deadline("silence", 120, longest=3) == 30
    assert pace.deadline("silence", 120, longest=0) == 20
