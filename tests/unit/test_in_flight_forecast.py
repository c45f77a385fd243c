"""The invariants of megatron_rl/sidecar/in_flight/forecast.py, held against a service that runs in virtual time."""

import dataclasses

import numpy as np
import pytest

from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight.curve import build_line
from megatron_rl.sidecar.in_flight.forecast import Opening, SamplingWork, predict
from tests.paced_run import Case, run_paced

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
    assert predict(_work(case, one.lengths), in_flight, 0.0, CURVE).trained == pytest.approx(one.seconds, rel=1e-3)


@pytest.mark.parametrize("ramp", [0.5, 1.0])
def test_the_first_groups_begin_at_the_delays_of_a_forecast_with_a_ramp(ramp: float) -> None:
    (at_once,) = run_paced(CASE, 1, Opening(32))
    forecast = predict(_work(CASE, at_once.lengths), 32, ramp, CURVE)
    assert len(forecast.delays) == 8
    assert list(forecast.delays) == sorted({*forecast.delays})
    (one,) = run_paced(CASE, 1, Opening(32, ramp, forecast.delays))
    assert one.lengths == at_once.lengths
    assert forecast.trained == pytest.approx(one.seconds, rel=1e-3)


def test_room_for_a_group_opens_with_each_delay_and_all_of_it_with_the_last() -> None:
    opening = Opening(16, 1.0, (0.0, 1.0, 2.5))
    assert [opening.count_room(seconds, 4) for seconds in (0.0, 0.9, 1.0, 2.4, 2.5)] == [4, 4, 8, 8, 16]
    assert Opening(16).count_room(0.0, 4) == 16


def test_engines_share_the_groups() -> None:
    lengths = [[50] * 4] * 16
    alone = predict(SamplingWork(lengths[:8], 32), 16, 0.0, CURVE)
    shared = predict(SamplingWork(lengths, 32, num_engines=2), 16, 0.0, CURVE)
    assert (shared.first, shared.sampled) == (alone.first, alone.sampled)


def test_a_trainer_that_waits_for_all_groups_costs_the_forecast_no_time() -> None:
    forecast = predict(SamplingWork([[50] * 4] * 16, 32), 16, 0.0, CURVE)
    assert forecast.trained == forecast.sampled


def _work(case: Case, lengths: list[list[int]]) -> SamplingWork:
    return SamplingWork(
        lengths, case.costs.max_running, case.num_engines, case.groups_per_slot, case.num_updates,
        case.order == "prompt", case.train_seconds,
    )  # fmt: skip


def test_the_time_of_a_forecast_is_a_sum_over_steps() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, (6, 3)).tolist()
    forecast = predict(SamplingWork(lengths, 9), 9, 0.0, CURVE)
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
