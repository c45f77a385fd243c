"""Traces of whole runs: two pipeline stages and a sidecar, ended and resumed, with a reference and an evaluation."""

from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.analysis.ledger import compute_ledger
from megatron_rl.observe import trace
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.trace import Process, Trace
from tests.e2e import loop

pytestmark = [pytest.mark.each_change, pytest.mark.timeout(600)]

NUM_GROUPS = 8


SHARED = {"pipeline_model_parallel_size": 2, "grpo_kl_beta": 0.01, "prompts_held_out": 2, "eval_interval": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def run(world) -> Path:
    """Run two iterations, and two more from the first checkpoint but one: the second is done again."""
    saved = SHARED | {"save": world.folder / "checkpoints", "save_interval": 1}
    loop.run(world.folder / "first", 2, world.words("run", train_iters=2, **saved))
    more = {"load": saved["save"], "ckpt_step": 1, "train_iters": 3, "override_opt_param_scheduler": True}
    loop.run(world.folder / "second", 2, world.words("run", **saved, **more))
    return world.folder / "runs" / "run"


@pytest.fixture(scope="module")
def found(run: Path) -> Trace:
    return trace.read_trace(run)


def of_version(process: Process, version: int) -> Counter:
    """Return the number of spans of each lane, name and role."""
    return Counter(
        (span.lane, span.name, span.details.get("role"))
        for window in process.windows
        for span in window.spans
        if window.version == version
    )


def test_every_process_has_a_line_of_every_iteration_once_and_one_of_what_came_after(found):
    assert [process.name for process in found.processes] == ["rank-0", "rank-1", "sidecar"]
    for process in found.processes:
        assert [window.version for window in process.windows] == [0, 1, 2, 3]


def test_every_stage_computes_every_micro_batch_under_each_role(found):
    for rank in found.ranks:
        for version in (1, 2):
            spans = of_version(rank, version)
            assert spans["compute", "forward", "policy"] == NUM_GROUPS
            assert spans["compute", "backward", "policy"] == NUM_GROUPS
            assert spans["compute", "forward", "reference"] == NUM_GROUPS
        # At first the reference is the policy.
        assert of_version(rank, 0)["compute", "forward", "reference"] == 0
    assert [rank.windows[0].facts["stage"] for rank in found.ranks] == [0, 1]


def test_the_loop_and_megatrons_messages_are_recorded(found):
    first, second = (of_version(rank, 1) for rank in found.ranks)
    for name in ("publish", "reference", "submit", "train", "schedule", "agree", "optimizer", "update", "complete",
                 "report", "save", "trace"):  # fmt: skip
        assert first["main", name, None] == second["main", name, None] > 0, name
    assert second["main", "forward-recv", None] > 0
    assert of_version(found.ranks[0], 2)["main", "evaluate", None] == 1


def test_the_groups_of_the_sidecar_are_those_that_were_trained_on(found):
    for version in range(3):
        spans = of_version(found.sidecar, version)
        # When the second iteration was done again, its groups came from the journal.
        num_groups = 0 if version == 1 else NUM_GROUPS + 2
        for name in ("queue", "generate", "reward"):
            assert spans["groups", name, None] == num_groups
        assert spans["engine-0", "load", None] == spans["engine-1", "load", None] == 1
    assert found.sidecar.windows[0].facts["engines"] == {"engine-0": 64, "engine-1": 64}


def test_all_clocks_were_compared_with_rank_0s(found):
    for process in found.processes:
        for window in process.windows:
            assert window.error is not None
    for rank in found.ranks:
        assert len({window.error for window in rank.windows}) <= 2


def test_an_iteration_of_the_sidecar_lies_within_that_of_rank_0(found):
    for version in range(3):
        rank, sidecar = (
            next(window for window in process.windows if window.version == version)
            for process in (found.ranks[0], found.sidecar)
        )
        (iteration,) = (span for span in sidecar.spans if span.name == "iteration")
        (training,) = (span for span in rank.spans if span.name == "train")
        assert sidecar.error is not None
        assert training.begin - sidecar.error <= iteration.begin
        assert iteration.end <= training.end + sidecar.error


def test_the_ledger_adds_up_on_every_process(found):
    accounts = compute_ledger(found)
    assert [account.name for account in accounts] == ["rank-0", "rank-1", "engine-0", "engine-1"]
    for account in accounts:
        assert round(sum(account.seconds.values()) * 1e9) == round(account.wall * 1e9)
        assert account.seconds["publish"] > 0
    for account in accounts[:2]:
        assert {cause for cause, seconds in account.seconds.items() if seconds} >= {
            "busy", "first", "publish", "bubble", "optimizer", "checkpoint", "evaluation", "report",
        }  # fmt: skip


def test_a_trace_changes_no_bit_of_training_and_can_be_turned_off(world, run, tmp_path):
    other = tmp_path / "run"
    words = SHARED | {"rollout_folder": other, "trace": "off", "train_iters": 1}
    loop.run(tmp_path / "off", 2, world.words("run", **words))
    assert not (other / "trace").exists()
    of_on, of_off = read_metrics(run)[0], read_metrics(other)[0]
    for name in ("loss", "gradient_norm", "fingerprint", "mismatch"):
        assert of_on[name] == of_off[name]
