"""Micro-batches of the trainer on the emulated device: the twin's numbers, and a host that never waits."""

from collections.abc import Callable

import pytest

from tests.distributed.grpo_trials import run_trials
from tests.distributed.test_grpo_step import Twins, check, remember_twins
from tests.grpo_problem import KNOWN, Problem, Trial, draw_problem
from tests.ranks import RanksError, run_ranks
from tests.rehearsal.order import NEVER_ORDERED, ORDERED_IF_ASKED
from tests.rehearsal.syncs import Copy, Sync, describe
from tests.rehearsal.trials import Rehearsed, rehearse
from tests.truth import worst_of

pytestmark = pytest.mark.each_change

TRIALS = [Trial("TP1", 4), Trial("TP1", 12, roles="separate")]
OFFLOADED = Trial("TP1", 12, more="--frozen-offload")

# Attention by the NPU's fused operators, which take half precision alone.
HALF = Trial("TP1", 12, more="--bf16 --shared-prompt-backend merge")

ORDERED = Trial("TP1", 12, more="--deterministic-mode")

# Sums over responses, before and after a token, means, weights and entropies.
NAMES = ("dapo", "gspo", "reinforce_plus_plus_baseline", "cispo")
ALGORITHMS = [Trial("TP1", 12, KNOWN[name], more="--deterministic-mode") for name in NAMES]


def run(problem: Problem, trials: list[Trial], fault: str | None = None) -> Rehearsed:
    return run_ranks(rehearse, 1, problem, trials, fault, platform="rehearsed")[0]


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def alone(problem: Problem) -> Rehearsed:
    return run(problem, [*TRIALS, OFFLOADED, HALF])


@pytest.fixture(scope="module")
def ordered(problem: Problem) -> Rehearsed:
    return run(problem, [ORDERED, *ALGORITHMS])


@pytest.fixture(scope="module")
def twins(problem: Problem) -> Callable[[Trial], Twins]:
    return remember_twins(problem)


@pytest.mark.parametrize("trial", [*TRIALS, OFFLOADED], ids=str)
def test_updates_on_the_device_equal_those_of_the_padded_twin(trial, alone, twins) -> None:
    check(trial, alone.seen[trial], twins(trial))


def test_half_precision_on_the_device_is_as_near_to_the_truth_as_on_the_cpu(alone, twins, problem) -> None:
    theirs = run_ranks(run_trials, 1, problem, [HALF])[0][HALF]
    error, tensor = worst_of(alone.seen[HALF][0].gradients, theirs[0].gradients, twins(HALF).first.truth.gradients)
    assert error <= 1, tensor


@pytest.mark.parametrize("trial", [*TRIALS, OFFLOADED, HALF], ids=str)
def test_the_host_never_waits_for_the_device_inside_the_schedule(trial, alone) -> None:
    for syncs in alone.syncs[trial]:
        assert not syncs, describe(syncs)


def test_a_batch_takes_one_copy_from_pinned_memory_and_its_thread_never_waits(alone) -> None:
    assert all(isinstance(one, Copy) and one.is_pinned for one in alone.loader), alone.loader
    assert len(alone.loader) == alone.num_batches > 0


def test_a_tensor_of_a_batch_that_is_copied_by_itself_is_a_pageable_copy_and_a_wait(problem) -> None:
    found = run(problem, TRIALS[:1], "a tensor of a batch copied by itself")
    assert sum(isinstance(one, Sync) for one in found.loader) == found.num_batches
    assert sum(isinstance(one, Copy) and not one.is_pinned for one in found.loader) == found.num_batches


@pytest.mark.parametrize("trial", ALGORITHMS, ids=str)
def test_the_host_never_waits_in_the_sums_of_an_algorithm(trial, ordered) -> None:
    for syncs in ordered.syncs[trial]:
        assert not syncs, describe(syncs)


@pytest.mark.parametrize("trial", [*TRIALS, OFFLOADED, HALF], ids=str)
def test_the_reports_of_all_micro_batches_are_read_in_one_wait(trial, alone) -> None:
    for syncs in alone.reads[trial]:
        assert len(syncs) == 1, describe(syncs)


def test_blocks_that_streams_share_are_ordered_by_events(alone) -> None:
    assert not alone.faults


def test_with_deterministic_mode_every_sum_has_a_fixed_order(ordered, twins) -> None:
    for trial in (ORDERED, *ALGORITHMS):
        check(trial, ordered.seen[trial], twins(trial))
    assert ordered.operators & ORDERED_IF_ASKED
    assert not ordered.operators & NEVER_ORDERED


def test_without_deterministic_mode_the_gradients_of_repeated_rows_have_no_fixed_order(alone) -> None:
    # docs/numerics.md describes a run that does not ask for a fixed order.
    repeated = {"aten::embedding_dense_backward", "aten::index_add", "aten::index_add_"}
    # The output layer's gradient and the NPU's statistics: each place gets one number.
    once = {"aten::scatter_add_", "aten::index_put_"}
    assert alone.operators & (ORDERED_IF_ASKED | NEVER_ORDERED) == repeated | once


def test_a_sum_without_a_fixed_order_is_found(problem) -> None:
    assert run(problem, [ORDERED], "running sums in the loss").operators & NEVER_ORDERED == {"aten::cumsum"}


def test_an_item_in_the_loss_is_a_wait_with_its_line(problem) -> None:
    for syncs in run(problem, TRIALS[:1], "an item() in the loss").syncs[TRIALS[0]]:
        assert {sync.what for sync in syncs} == {"_local_scalar_dense"}
        assert len(syncs) == len(TRIALS) * 3
        assert all("forward_step" in sync.where for sync in syncs)


def test_the_time_of_a_pass_read_in_the_schedule_is_a_wait(problem) -> None:
    for syncs in run(problem, TRIALS[:1], "the time of a pass read at once").syncs[TRIALS[0]]:
        assert {sync.what for sync in syncs} == {"seconds_between"}


@pytest.mark.parametrize(
    ("trial", "fault", "message"),
    [
        (TRIALS[0], "a tensor of a batch left on the host", "two devices, npu:0 and cpu.*data.batch"),
        (TRIALS[0], "a batch is used before it has arrived", "no event between: .*after copy to the device"),
        (OFFLOADED, "a layer computes before it has arrived", "no event between: .*after copy to the device"),
        (OFFLOADED, "a layer is copied into memory that is still used", "no event between: copy to the device"),
        (OFFLOADED, "the host's weights change while they are copied", "memory was changed while it was still being"),
    ],
)
def test_a_fault_of_device_handling_is_found(trial, fault, message, problem) -> None:
    with pytest.raises(RanksError, match=message):
        run(problem, [trial], fault)
