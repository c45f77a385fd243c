"""What ends a run ends all of its ranks, soon, and with one reason."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e import loop

PATCH_LOSS = """
    from megatron_rl.algorithm.objective import Objective
    loss = Objective.loss
    calls = []
    def faulty(self, *arguments, **keywords):
        calls.append(1)
        total, statistics = loss(self, *arguments, **keywords)
        if len(calls) == 6:
            {fault}
        return total, statistics
    Objective.loss = faulty
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("faults"))


def reasons(ranks: loop.Ranks) -> list[str]:
    """What each rank says the run ended for."""
    return [re.findall(r"the run ended: (.*)", path.read_text())[-1] for path in ranks.outputs]


def ended(world: loop.World, name: str, expected: str, code: int, faults=None, **changes) -> None:
    """All ranks end by themselves, with this exit code, for this reason."""
    folder = world.folder / name
    words = world.words(name, rollout_folder=folder / name, **changes)
    with loop.running(folder, 2, words, faults) as ranks:
        codes = ranks.wait()
    assert codes == [code, code], ranks.text()
    found = set(reasons(ranks))
    assert len(found) == 1, ranks.text()
    assert re.search(expected, found.pop()), ranks.text()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.each_change
def test_an_exception_on_the_last_stage_ends_the_first_one_too(world):
    fault = PATCH_LOSS.format(fault="raise ZeroDivisionError('planted')")
    ended(world, "last", r"ZeroDivisionError: planted \(rank 1\)", 1, {1: fault}, pipeline_model_parallel_size=2)


def test_an_exception_on_one_replica_ends_the_other_too(world):
    ended(
        world, "replica", r"planted \(rank 0\)", 1, {0: PATCH_LOSS.format(fault="raise ZeroDivisionError('planted')")}
    )


def test_a_loss_that_is_no_number_ends_the_run_before_the_update(world):
    fault = PATCH_LOSS.format(fault="statistics.sums['loss'] = total.detach() * float('nan')")
    ended(world, "nan", r"the loss of micro-batch \d is nan", 5, {1: fault})


@pytest.mark.each_change
def test_a_reward_that_raises_ends_all_ranks_by_its_name(world, tmp_path):
    reward = tmp_path / "bad.py"
    reward.write_text("def bad(prompts, completions, completion_ids, **columns):\n    raise KeyError('solution')\n")
    ended(world, "reward", r"iteration 0 failed: .*bad.*KeyError.*solution", 5, reward=f"{reward}:bad")


@pytest.mark.each_change
def test_a_sidecar_that_is_gone_ends_all_ranks_by_name(world):
    folder = world.folder / "gone"
    script = world.folder / "slow.json"
    script.write_text(json.dumps({"delay": [2.0, 2.0], "delay_seed": 1}))
    words = world.words(
        "gone", rollout_folder=folder / "gone", rollout_script=script, rollout_patience_seconds=5, train_iters=50
    )
    with loop.running(folder, 2, words) as ranks:
        until_line(ranks, folder / "gone", 1)
        (sidecar,) = [
            child for child in psutil.Process(ranks.processes[0].pid).children()
            if "megatron_rl.sidecar" in child.cmdline()
        ]  # fmt: skip
        sidecar.kill()
        killed = time.monotonic()
        codes = ranks.wait()
        print(f"all ranks ended {time.monotonic() - killed:.1f} s after the sidecar")
    assert codes == [5, 5], ranks.text()
    assert len({reason.split("(")[0] for reason in reasons(ranks)}) == 1
    assert "did not answer for 5 s" in reasons(ranks)[0]


@pytest.mark.each_change
def test_a_run_that_is_asked_to_stop_finishes_its_iteration_and_saves_it(world):
    folder = world.folder / "stop"
    words = world.words("stop", rollout_folder=folder / "stop", save=folder / "save", train_iters=500)
    with loop.running(folder, 2, words) as ranks:
        until_line(ranks, folder / "stop", 1)
        ranks.signal(signal.SIGTERM)
        assert ranks.wait() == [0, 0], ranks.text()
    written = len((folder / "stop" / "metrics.jsonl").read_text().splitlines())
    assert 1 <= written < 500
    assert (folder / "save" / "latest_checkpointed_iteration.txt").read_text() == str(written)


@pytest.mark.each_change
def test_a_run_that_cannot_stop_in_time_leaves_its_checkpoint_as_it_is_and_no_weights(world):
    folder = world.folder / "grace"
    script = world.folder / "slowest.json"
    script.write_text(json.dumps({"delay": [30.0, 30.0], "delay_seed": 1}))
    shared = folder / "shared"
    words = world.words(
        "grace", rollout_folder=folder / "grace", rollout_script=script, save=folder / "save", exit_grace_seconds=1,
        publish_folder=shared,
    )  # fmt: skip
    with loop.running(folder, 2, words) as ranks:
        deadline = time.monotonic() + 600
        while not list(shared.glob("*/version-0")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert list(shared.glob("*/version-0/*")), ranks.text()
        time.sleep(1)
        ranks.signal(signal.SIGTERM)
        assert ranks.wait() == [143, 143], ranks.text()
    assert "grace are over" in ranks.text()
    assert list(shared.iterdir()) == []
    assert not (folder / "save" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.each_change
def test_a_reward_file_that_does_not_import_is_said_before_an_engine_is_started(world, tmp_path):
    reward = tmp_path / "broken.py"
    reward.write_text("import nothing_of_this_name\n")
    folder = world.folder / "broken"
    with loop.running(folder, 1, world.words("broken", reward=f"{reward}:f", rollout_folder=folder / "r")) as ranks:
        assert ranks.wait() == [5]
    assert "nothing_of_this_name" in ranks.text()
    assert "serving" not in ranks.text()


@pytest.mark.each_change
def test_a_wrong_row_is_said_before_an_engine_is_started(world, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 2 3"}\n{"question": "4 5 6"}\n')
    folder = world.folder / "row"
    with loop.running(folder, 1, world.words("row", prompts=prompts, rollout_folder=folder / "r")) as ranks:
        assert ranks.wait() == [4]
    assert re.search(r"pretrain_grpo.py: .*prompts.jsonl.*2.*prompt", ranks.text()), ranks.text()
    assert not (folder / "r").exists()


@pytest.mark.each_change
def test_weights_that_are_not_there_are_said_before_an_engine_is_started(world, tmp_path):
    folder = world.folder / "weights"
    words = world.words("weights", rollout_folder=folder / "r", grpo_kl_beta=0.1, grpo_ref_model=tmp_path)
    with loop.running(folder, 1, words) as ranks:
        assert ranks.wait() == [4]
    assert f"{tmp_path} holds no *.safetensors" in ranks.text()
    assert not (folder / "r").exists()


def until_line(ranks: loop.Ranks, run: Path, count: int, seconds: float = 600.0) -> None:
    """Wait until so many iterations are written down."""
    deadline = time.monotonic() + seconds
    path = run / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, ranks.text()
        assert all(process.poll() is None for process in ranks.processes), ranks.text()
        time.sleep(0.1)
