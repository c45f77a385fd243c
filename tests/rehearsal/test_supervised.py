"""Updates of --stage sft on emulated devices, one a rank: the twin's numbers, no mixed operands, no host that waits."""

from typing import Any
from unittest import mock

import pytest

from megatron_rl.trainer.loop import supervised
from tests import hf_models
from tests.distributed.supervised_trials import DEMONSTRATIONS_PER_UPDATE, Seen, Trial, run_trials
from tests.distributed.test_supervised import HELD_OUT, LAYOUTS, ROWS, check_update, twins_at
from tests.ranks import run_ranks
from tests.rehearsal.streams import state
from tests.rehearsal.syncs import Sync, describe, log

NAMES = ("TP2", "DP2, overlapped", "CP2")


def rehearse(trials: dict[str, Trial]) -> tuple[dict[str, list[Seen]], list[Sync], list[str]]:
    """Run the trials; return results, the host's waits inside the schedule, and faults in the order of streams."""
    waits: list[Sync] = []
    true = supervised.run_schedule

    def counting(*arguments: Any, **keywords: Any) -> Any:
        with log.during() as syncs:
            returned = true(*arguments, **keywords)
        waits.extend(syncs)
        return returned

    with mock.patch.object(supervised, "run_schedule", counting):
        seen = run_trials(trials)
    return seen, waits, state.faults


@pytest.mark.slow
def test_updates_on_devices_equal_the_twins_and_no_rank_waits_for_its_device(tmp_path) -> None:
    folder = hf_models.draw("qwen3", tmp_path)
    trials = {name: Trial(folder, LAYOUTS[name], ROWS, HELD_OUT) for name in NAMES}
    ranks = run_ranks(rehearse, 2, trials, platform="rehearsed")
    for name in NAMES:
        first, _ = ranks[0][0][name]
        check_update(name, first, ROWS[:DEMONSTRATIONS_PER_UPDATE], twins_at(folder))
    for _, waits, faults in ranks:
        assert not waits, describe(waits)
        assert not faults
