"""The invariants of megatron_rl/sidecar/in_flight/control.py, on a service that runs in virtual time."""

import dataclasses
import logging
from typing import Any

import pytest

from megatron_rl.shared.protocol import wire
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight import control
from megatron_rl.sidecar.in_flight.control import Pacer
from megatron_rl.sidecar.in_flight.curve import GroupLife
from megatron_rl.sidecar.in_flight.forecast import Forecast, Opening, SamplingWork, choose, list_numbers
from tests import virtual_time
from tests.paced_run import Case, PacedIteration, run_paced

# All responses of an iteration fit into the engine, and training takes as long as sampling them together.
ONE_WAVE = Case(StepCosts(0.005, 0.001, max_running=256), 32, 8, lengths=(100, 100), train_seconds=26.0)
SPREAD = dataclasses.replace(ONE_WAVE, lengths=(20, 180))
NUM_SETTLED = 6
STEP_BOUND = StepCosts(0.5, 0.001, max_running=256)


@pytest.mark.parametrize(
    "case",
    [ONE_WAVE, SPREAD, dataclasses.replace(SPREAD, num_engines=2), dataclasses.replace(SPREAD, costs=STEP_BOUND)],
    ids=["one length", "several lengths", "two engines", "steps that cost the same for any number"],
)
def test_chosen_numbers_are_within_3_percent_of_the_best_fixed_one(case: Case) -> None:
    best = min(
        _mean_seconds(run_paced(case, NUM_SETTLED, Opening(number)))
        for number in list_numbers(case.group_size, case.most, case.num_prompts)[::2]
    )
    assert _mean_seconds(run_paced(case, 4 + NUM_SETTLED)[4:]) < 1.03 * best


def test_the_first_iteration_has_all_of_the_bound_and_the_second_at_least_half_of_what_was_seen() -> None:
    first, second, *_ = run_paced(ONE_WAVE, 3)
    assert first.opening == Opening(ONE_WAVE.most)
    assert second.opening.num_in_flight == 128
    assert second.opening.pace is None


def test_trying_fewer_responses_takes_at_most_twice_the_time_of_sampling() -> None:
    """Take an engine whose steps last as long for any number of responses: fewer at once lose the most."""
    case = dataclasses.replace(ONE_WAVE, costs=dataclasses.replace(STEP_BOUND, per_response=0.0), train_seconds=50.0)
    first, *others = run_paced(case, 8)
    sampling = 100 * 0.5
    assert max(one.seconds for one in others) <= first.seconds + sampling
    assert _mean_seconds(others[4:]) <= first.seconds


def test_choices_change_times_alone() -> None:
    """Compare the bytes of all slots, in prompt order."""
    case = dataclasses.replace(SPREAD, order="prompt", groups_per_slot=2)
    chosen, fixed = run_paced(case, 5), run_paced(case, 5, Opening(16))
    assert len({one.opening for one in chosen}) > 2
    assert [one.slots for one in chosen] == [one.slots for one in fixed]
    assert [one.seconds for one in chosen] != [one.seconds for one in fixed]


@pytest.mark.parametrize("tail", ["truncate", "carry"])
def test_nothing_is_chosen_where_the_order_of_ends_decides_what_is_trained_on(tail: str) -> None:
    case = dataclasses.replace(SPREAD, tail=tail, num_tail=4)
    assert {one.opening for one in run_paced(case, 3)} == {Opening(SPREAD.most)}


def test_a_changed_choice_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="megatron_rl.sidecar.in_flight.control"):
        run_paced(ONE_WAVE, 2)
    said = [record.getMessage() for record in caplog.records if "each engine is given" in record.getMessage()]
    assert said[0] == (
        "each engine is given 128 responses at once from now on, and was given 512 responses at once: sampling is "
        "predicted to take 26.1 s, and training to end after 39.1 s"
    )


def test_choices_settle() -> None:
    numbers = [one.opening.num_in_flight for one in run_paced(SPREAD, 12)[5:]]
    assert max(numbers) <= 2 * min(numbers)


@pytest.mark.parametrize(
    ("is_chosen", "num_sampled", "seconds", "is_learned"),
    [(True, 4, 9.0, True), (False, 4, 9.0, False), (True, 3, 9.0, False), (True, 4, None, False)],
    ids=["a whole iteration", "a fixed number", "a resumed one beside an evaluation", "a trainer without seconds"],
)
def test_a_whole_iteration_is_learned_from_and_others_are_not(
    is_chosen: bool, num_sampled: int, seconds: float | None, is_learned: bool
) -> None:
    async def iterate() -> bool:
        pacer = Pacer(8, 4, is_chosen)
        await pacer.begin(wire.Plan(num_prompts=4, group_size=2, num_replicas=1, micro_batch_size=2))
        for place in range(num_sampled):
            pacer.sampled(GroupLife("engine-0", float(place), place + 1.0, (10, 10)))
        pacer.sampled(GroupLife("engine-0", 0.0, 1.0, (10, 10), is_evaluation=True))
        pacer.end(seconds)
        await pacer.begin(wire.Plan(num_prompts=4, group_size=2, num_replicas=1, micro_batch_size=2))
        await pacer.close()
        return bool(pacer._points)

    assert virtual_time.run(iterate()) == is_learned


def test_a_forecast_gets_the_groups_of_all_engines_in_the_order_in_which_they_began(monkeypatch) -> None:
    works: list[SamplingWork] = []

    def keep(work: SamplingWork, *arguments: Any) -> Forecast:
        works.append(work)
        return choose(work, *arguments)

    async def iterate() -> None:
        pacer = Pacer(8, 4)
        plan = wire.Plan(num_prompts=4, group_size=2, num_replicas=1, micro_batch_size=2)
        await pacer.begin(plan)
        # The first to begin, the longest, ends last.
        for begun, ended, length in ((3, 4, 10), (2, 6, 20), (1, 7, 30), (0, 9, 40)):
            pacer.sampled(GroupLife(f"engine-{begun % 2}", float(begun), float(ended), (length, length)))
        pacer.end(9.0)
        await pacer.begin(plan)
        await pacer.close()

    monkeypatch.setattr(control, "choose", keep)
    virtual_time.run(iterate())
    assert [(work.lengths, work.num_engines) for work in works] == [([(40, 40), (30, 30), (20, 20), (10, 10)], 2)]


def _mean_seconds(iterations: list[PacedIteration]) -> float:
    return sum(one.seconds for one in iterations) / len(iterations)
