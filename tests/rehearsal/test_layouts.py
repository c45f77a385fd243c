"""Parallel layouts on emulated devices, one a rank: the twin's numbers, no mixed operands, no host that waits."""

import pytest

from tests.distributed.grpo_trials import WORLD_SIZES
from tests.distributed.test_grpo_step import Twins, check
from tests.grpo_problem import OVERLAPPED, Problem, Trial, draw_problem
from tests.ranks import run_ranks
from tests.rehearsal.syncs import Sync, describe
from tests.rehearsal.trials import Rehearsed, rehearse

TRIALS = [
    Trial("TP2", 12),
    Trial("DP2", 12, optimizer=OVERLAPPED),
    Trial("CP2", 12),
    Trial("PP2", 12),
]


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    return draw_problem(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def ranks(problem: Problem) -> list[Rehearsed]:
    return run_ranks(rehearse, 2, problem, TRIALS, platform="rehearsed")


def is_message_length(sync: Sync) -> bool:
    """Megatron's stages read on the host how long the next message is."""
    return "megatron.core.pipeline_parallel.p2p_communication" in sync.where


@pytest.mark.each_change
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_updates_in_a_layout_on_devices_equal_those_of_the_padded_twin(trial, ranks, problem) -> None:
    check(trial, ranks[0].seen[trial], Twins(problem, trial))


@pytest.mark.each_change
@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_no_rank_waits_for_its_device_inside_the_schedule_but_for_the_length_of_a_message(trial, ranks) -> None:
    for syncs in (of_run for rank in ranks for of_run in rank.syncs[trial]):
        own = [sync for sync in syncs if not is_message_length(sync)]
        assert not own, describe(own)
        assert trial.layout == "PP2" or not syncs


@pytest.mark.each_change
def test_what_streams_share_is_ordered_on_every_rank(ranks) -> None:
    assert not any(rank.faults for rank in ranks)
    assert all(WORLD_SIZES[trial.layout] == len(ranks) for trial in TRIALS)
