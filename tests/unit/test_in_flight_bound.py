"""The bound of benchmarks/in_flight.py, which no order of groups is below."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.in_flight import bound_seconds
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight.forecast import PACES, SamplingWork, predict
from tests.paced_run import Case, build_line

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
