"""The bound for results that are near enough to the float64 truth."""

import math

import pytest
import torch

from tests.truth import (
    FACTOR,
    FLOOR_UNITS,
    error_over_bound,
    everything_in,
    mean_over_bound,
    weighted_over_bound,
    worst_of,
)

TRUTH = torch.tensor([3.0, -0.5], dtype=torch.float64)
# The unit of float32 in the last place of 3.
UNIT = 2.0**-22


def moved(by: float) -> torch.Tensor:
    return TRUTH + torch.tensor([0.0, by], dtype=torch.float64)


def test_twice_the_other_programs_error_and_some_units_of_the_largest_value_are_allowed() -> None:
    error = 2.0**-10
    bound = FACTOR * error + FLOOR_UNITS * UNIT
    theirs = moved(error).float()
    assert error_over_bound(moved(-error).float(), theirs, TRUTH) == error / bound < 1
    assert error_over_bound(moved(3 * error).float(), theirs, TRUTH) > 1
    assert error_over_bound(moved(2 * UNIT).float(), TRUTH.float(), TRUTH) == 2 / FLOOR_UNITS
    assert error_over_bound(TRUTH.float(), TRUTH.float(), TRUTH) == 0


def test_a_result_with_nan_is_never_near() -> None:
    broken = moved(math.nan).float()
    assert error_over_bound(broken, TRUTH.float(), TRUTH) == math.inf
    near, truth = (dict.fromkeys("abc", tensor) for tensor in (TRUTH.float(), TRUTH))
    assert worst_of({**near, "b": broken}, near, truth) == (math.inf, "b")
    assert worst_of(near, near, truth)[0] == 0


def test_errors_of_a_models_tensors_are_compared_relative_to_each_ones_largest_value() -> None:
    truth = {"first": TRUTH, "second": 100 * TRUTH}
    theirs = {"first": moved(2.0**-10).float(), "second": truth["second"].float()}
    # As near by its own largest value as the other program is at the other tensor.
    ours = {"first": TRUTH.float(), "second": (100 * moved(2.0**-10)).float()}
    error, name = worst_of(ours, theirs, truth)
    assert name == "second"
    assert error == pytest.approx(0.5, rel=0.01)
    assert error_over_bound(ours[name], theirs[name], truth[name]) > 1


def test_a_mean_may_be_as_far_off_as_one_of_its_terms() -> None:
    theirs = moved(2.0**-10).float()
    mean = TRUTH.mean().item()
    assert mean_over_bound(mean + 2.0**-10, theirs, TRUTH) == pytest.approx(0.5, rel=0.01)
    assert mean_over_bound(mean + 3 * 2.0**-10, theirs, TRUTH) > 1
    assert weighted_over_bound(0.25 * mean - 2.0**-10, 0.25 * mean, theirs, TRUTH) == pytest.approx(0.5, rel=0.01)


def test_under_everything_in_float64_casts_to_float32_give_float64() -> None:
    values = torch.tensor([0.1, 0.2], dtype=torch.float64)
    with everything_in(torch.float64):
        results = [values.float(), values.to(torch.float32), values.softmax(0, dtype=torch.float32)]
        results.append(torch.arange(3, dtype=torch.float32))
    assert all(result.dtype == torch.float64 for result in results)
    assert values.float().dtype == torch.float32
    with everything_in(torch.float32):
        assert values.float().dtype == torch.float32
