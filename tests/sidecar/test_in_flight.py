"""The invariants of megatron_rl/sidecar/in_flight/control.py, in virtual time, and seen from outside of a sidecar."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.observe.trace import Span, read_trace
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.sidecar.engines.decoding import StepCosts
from megatron_rl.sidecar.in_flight import control
from megatron_rl.sidecar.in_flight.control import Pacer
from megatron_rl.sidecar.in_flight.curve import GroupLife
from megatron_rl.sidecar.in_flight.forecast import Forecast, Opening, SamplingWork, choose, list_numbers
from tests import virtual_time
from tests.paced_run import Case, PacedIteration, run_paced
from tests.sidecar.scripted_service import submission, weights
from tests.sidecar.sidecar_process import sidecar

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


PLAN = wire.Plan(num_prompts=16, group_size=8, num_replicas=1, micro_batch_size=8)
NUM_RESPONSES, NUM_TOKENS = 128, 50
STEP, RESPONSE = 0.001, 0.00012
# Sampling all at once takes as long as training. Without overlap an iteration takes both, and ideally one of them.
IDEAL = NUM_TOKENS * (STEP + RESPONSE * NUM_RESPONSES)
NUM_ITERATIONS, NUM_LEARNING = 5, 3


def run_iteration(client: RolloutClient, version: int) -> int | None:
    """Take all slots, and report seconds of training; return the most responses that were in flight."""
    client.publish(weights(version), 60)
    sampling = wire.Sampling(max_tokens=NUM_TOKENS)
    client.submit(msgspec.structs.replace(submission(version, PLAN, deadline=600), sampling=sampling))
    for index in range(PLAN.num_prompts):
        assert client.slot(version, 0, index, 600) is not None
    mismatch = wire.Mismatch(mean=0.0, largest=0.0, bound=None)
    return client.complete(version, mismatch, seconds=IDEAL).num_in_flight


def count_begun_late(groups: list[Span]) -> int:
    """Count the groups that began once the first had ended."""
    first = min(span.end for span in groups)
    return sum(span.begin > first for span in groups)


def find_seconds(groups: list[Span]) -> float:
    """Return the seconds of the iteration with a trainer that takes groups as they end, one after the other.

    The engine's times are those of the process. Training is computed, so that a busy machine does not prolong it.
    """
    begin, done = min(span.begin for span in groups), 0.0
    for end in sorted(span.end - begin for span in groups):
        done = max(done, end) + IDEAL / PLAN.num_prompts
    return done


@pytest.mark.each_change
def test_a_sidecar_spreads_the_ends_of_groups_over_an_iteration_once_it_knows_the_engines_steps(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.json", tmp_path / "run"
    script.write_text(json.dumps({"lengths": [NUM_TOKENS, NUM_TOKENS], "step_seconds": [STEP, RESPONSE]}))
    words = ("--rollout-engine", "scripted", "--rollout-script", str(script), "--reward", "length:8")
    words += ("--rollout-max-num-seqs", str(NUM_RESPONSES), "--rollout-max-in-flight", "auto")
    with sidecar(folder, *words) as process, process.client() as client:
        client.take_lease("run")
        numbers = [run_iteration(client, version) for version in range(NUM_ITERATIONS)]
        assert process.end() == 0
    found = read_trace(folder).sidecar
    assert found is not None
    groups = [[span for span in window.spans if span.name == "generate"] for window in found.windows]
    assert [len(one) for one in groups[:NUM_ITERATIONS]] == [PLAN.num_prompts] * NUM_ITERATIONS
    at_once, settled = groups[0], groups[NUM_LEARNING:NUM_ITERATIONS]
    # The first iteration is one with a fixed number that holds all.
    assert (numbers[0], count_begun_late(at_once)) == (2 * NUM_RESPONSES, 0)
    assert find_seconds(at_once) > 1.95 * IDEAL
    assert all(count_begun_late(one) >= PLAN.num_prompts / 4 for one in settled)
    # In virtual time it is 1.3. The machine may be busy during one of them.
    assert min(map(find_seconds, settled)) < 1.5 * IDEAL
