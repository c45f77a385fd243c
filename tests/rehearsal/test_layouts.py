"""Parallel layouts on emulated devices, one a rank: the twin's numbers, no mixed operands, no host that waits."""

from collections.abc import Callable

import pytest

from tests.distributed.test_grpo_step import Twins, check, remember_twins
from tests.distributed.training import WORLD_SIZES
from tests.grpo_problem import OVERLAPPED, Problem, Trial, draw_problem
from tests.ranks import run_ranks
from tests.rehearsal.syncs import Sync, describe
from tests.rehearsal.trials import Rehearsed, rehearse
from tests.truth import worst_of

pytestmark = pytest.mark.each_change

TRIALS = [
    Trial("TP2", 12),
    Trial("DP2", 12, optimizer=OVERLAPPED),
    Trial("CP2", 12),
    Trial("PP2", 12),
]
EXPERTS = Trial("EP2", 12)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def twins(problem: Problem) -> Callable[[Trial], Twins]:
    return remember_twins(problem)


@pytest.fixture(scope="module")
def ranks(problem: Problem) -> list[Rehearsed]:
    return run_ranks(rehearse, 2, problem, TRIALS, platform="rehearsed")


@pytest.fixture(scope="module")
def sparse_problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("sparse"), "qwen3_moe")


@pytest.fixture(scope="module")
def sparse_ranks(sparse_problem: Problem) -> list[Rehearsed]:
    return run_ranks(rehearse, 2, sparse_problem, [EXPERTS], platform="rehearsed")


def is_message_length(sync: Sync) -> bool:
    """Return True for Megatron's own wait: its stages read on the host how long the next message is."""
    return "megatron.core.pipeline_parallel.p2p_communication" in sync.where


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_updates_in_a_layout_on_devices_equal_those_of_the_padded_twin(trial, ranks, twins) -> None:
    check(trial, ranks[0].seen[trial], twins(trial))


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_no_rank_waits_for_its_device_inside_the_schedule_but_for_the_length_of_a_message(trial, ranks) -> None:
    for syncs in (of_run for rank in ranks for of_run in rank.syncs[trial]):
        own = [sync for sync in syncs if not is_message_length(sync)]
        assert not own, describe(own)
        assert trial.layout == "PP2" or not syncs


def test_blocks_that_streams_share_are_ordered_on_every_rank(ranks) -> None:
    assert not any(rank.faults for rank in ranks)
    assert all(WORLD_SIZES[trial.layout] == len(ranks) for trial in TRIALS)


def test_gradients_through_experts_on_devices_equal_those_of_the_padded_twin(sparse_ranks, sparse_problem) -> None:
    expected = Twins(sparse_problem, EXPERTS).first
    gradients = sparse_ranks[0].seen[EXPERTS][0].gradients
    # transformers holds a layer's experts in one tensor. The layers below have gradients that came through them.
    names = gradients.keys() & expected.truth.gradients.keys()
    assert {name for name in gradients if ".experts." not in name} <= names
    of_twin = (expected.theirs.gradients, expected.truth.gradients)
    error, tensor = worst_of(*({name: one[name] for name in names} for one in (gradients, *of_twin)))
    assert error <= 1, tensor
    assert not any(rank.faults for rank in sparse_ranks)


def test_experts_make_the_host_wait_in_megatrons_dispatcher_alone(sparse_ranks) -> None:
    for syncs in (of_run for rank in sparse_ranks for of_run in rank.syncs[EXPERTS]):
        own = [sync for sync in syncs if "megatron.core.transformer.moe" not in sync.where]
        assert not own, describe(own)
