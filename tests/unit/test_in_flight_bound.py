"""The bound of benchmarks/in_flight.py, which no order of groups is below."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.in_flight import bound_seconds
from megatron_rl.sidecar.engines.decoding import StepCosts
from tests.paced_run import Case

CASES = st.builds(
    Case,
    costs=st.builds(StepCosts, st.floats(1e-3, 10), st.floats(1e-3, 1), st.just(10**6)),
    num_prompts=st.integers(1, 24),
    group_size=st.integers(1, 8),
    lengths=st.just((50, 50)),
    train_seconds=st.floats(0, 2000),
)


@settings(max_examples=200, deadline=None)
@given(CASES, st.integers(0, 10**6), st.floats(0.0, 30.0))
def test_no_order_of_groups_takes_less_time_than_the_bound(case: Case, seed: int, spread: float) -> None:
    begins = np.random.default_rng(seed).random(case.num_prompts) * spread * 50
    assert _seconds(case, begins) >= bound_seconds(case) * (1 - 1e-9)


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0])
def test_groups_at_even_distances_come_near_the_bound(load: float) -> None:
    count = 64
    case = Case(StepCosts(1.0, 0.05, 10**6), count, 8, (50, 50), train_seconds=load * 50 * (1 + 0.05 * 8 * count))
    distances = np.geomspace(0.1, 50, 60)
    assert min(_seconds(case, distance * np.arange(count)) for distance in distances) < 1.1 * bound_seconds(case)


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
