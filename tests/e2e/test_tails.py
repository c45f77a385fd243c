"""The last groups of an iteration, over whole runs that are killed: no prompt is lost or trained twice."""

import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read
from megatron_rl.records.audit_check import verify
from tests.e2e import loop
from tests.e2e.test_resume import fault

ITERATIONS = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("tails"))


def words(world: loop.World, folder: Path, tail: str) -> list[str]:
    """Groups of two engines take from no time to 0.3 s."""
    script = world.folder / "script.json"
    script.write_text(json.dumps({"lengths": [6, 24], "delay": [0.0, 0.3], "delay_seed": 5}))
    return world.words(
        "run", rollout_folder=folder / "run", save=folder / "save", load=folder / "save", save_interval=1,
        rollout_patience_seconds=5, train_iters=ITERATIONS, consume_order="completion", rollout_script=script,
        rollout_tail=tail, rollout_tail_groups=4, distributed_timeout_minutes=1,
    )  # fmt: skip


def read_events(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]


def list_trained(run: Path) -> tuple[list[list[str]], list[list[str]]]:
    """By version, in its last attempt: the hashes of the prompts that were submitted, and of those trained on."""
    submitted: list[list[str]] = [[] for _ in range(ITERATIONS)]
    trained: list[list[str]] = [[] for _ in range(ITERATIONS)]
    for event in read_events(run):
        version = event.get("version", 0)
        if event["event"] == "submit":
            submitted[version], trained[version] = event["prompts"], []
            assert event["num_carried"] == (8 if version == 2 else 0)
        elif event["event"] == "claim":
            trained[version] += [submitted[version][prompt] for prompt in event["prompts"]]
    return submitted, trained


def assert_each_prompt_counts_once(run: Path) -> None:
    """What the first two iterations put off is the third, and the last four are still put off at the end."""
    assert verify(run).breaches == []
    submitted, trained = list_trained(run)
    assert [len(of_version) for of_version in submitted] == [12, 12, 8, 12]
    assert [len(of_version) for of_version in trained] == [8] * ITERATIONS
    assert set(Counter(prompt for of_version in trained for prompt in of_version).values()) == {1}
    late = [prompt for version in (0, 1) for prompt in submitted[version] if prompt not in trained[version]]
    assert set(trained[2]) == set(late)
    assert len({prompt for prompts in submitted for prompt in prompts}) == 8 * ITERATIONS + 4


@pytest.mark.each_change
def test_prompts_that_are_put_off_are_trained_on_next_also_by_a_run_that_was_killed(world):
    folder = world.folder / "carry"
    with loop.running(folder, 2, words(world, folder, "carry"), {1: fault("backward", "rank", call=6)}) as ranks:
        assert all(ranks.wait())
    loop.run(folder, 2, words(world, folder, "carry"))
    assert_each_prompt_counts_once(folder / "run")


@pytest.mark.each_change
def test_responses_that_are_cut_off_are_trained_on_and_counted_as_truncated(world):
    folder = world.folder / "truncate"
    loop.run(folder, 2, words(world, folder, "truncate"))
    assert verify(folder / "run").breaches == []
    reasons = [
        {response["finish_reason"] for response in event["responses"]}
        for event in read_events(folder / "run")
        if event["event"] == "group"
    ]
    assert 0 < sum("cut" in of_group for of_group in reasons) <= 4 * ITERATIONS
    assert any(line["responses"]["truncated"] > 0 for line in read(folder / "run"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_prompt_is_lost_by_runs_that_are_killed_at_random_moments(world):
    draw = random.Random(7)
    for number in range(5):
        folder, victim, delay = world.folder / f"random-{number}", draw.choice([0, 1]), draw.uniform(0.0, 6.0)
        with loop.running(folder, 2, words(world, folder, "carry")) as ranks:
            started = time.monotonic()
            while not (folder / "run" / "address").exists() and time.monotonic() < started + 600:
                time.sleep(0.05)
            time.sleep(delay)
            ranks.processes[victim].kill()
            ranks.wait()
        loop.run(folder, 2, words(world, folder, "carry"))
        assert_each_prompt_counts_once(folder / "run")
        print(f"rank {victim} killed {delay:.1f} s after the sidecar served: no prompt lost")
