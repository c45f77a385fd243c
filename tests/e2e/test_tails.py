"""The last groups of an iteration, over whole runs that are killed: no prompt is lost or trained twice."""

import json
import random
import re
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.config.settings import DataConfig
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_log import hash_content
from megatron_rl.trainer.data.prompts import load_prompts
from tests.e2e import loop
from tests.e2e.test_resume import fault

ITERATIONS = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return loop.make_world(tmp_path_factory.mktemp("tails"))


def words(world: loop.World, folder: Path, tail: str) -> list[str]:
    """Return words by which groups of two engines take between 0 and 0.3 s."""
    script = world.folder / "script.json"
    script.write_text(json.dumps({"lengths": [6, 24], "delay": [0.0, 0.3], "delay_seed": 5}))
    return world.words(
        "run", rollout_folder=folder / "run", save=folder / "save", load=folder / "save", save_interval=1,
        rollout_patience_seconds=5, train_iters=ITERATIONS, consume_order="completion", rollout_script=script,
        rollout_tail=tail, rollout_tail_groups=None if tail == "stop" else 4, distributed_timeout_minutes=1,
    )  # fmt: skip


def list_trained(run: Path) -> tuple[list[list[str]], list[list[str]]]:
    """Return the hashes of the prompts submitted, and of those trained on, by version in its last attempt."""
    submitted: list[list[str]] = [[] for _ in range(ITERATIONS)]
    trained: list[list[str]] = [[] for _ in range(ITERATIONS)]
    for event in loop.read_events(run):
        version = event.get("version", 0)
        if event["event"] == "submit":
            submitted[version], trained[version] = event["prompts"], []
            assert event["num_carried"] == (8 if version == 2 else 0)
        elif event["event"] == "claim":
            trained[version] += [submitted[version][prompt] for prompt in event["prompts"]]
    return submitted, trained


def assert_each_prompt_counts_once(run: Path) -> None:
    """Check that the third iteration has the prompts that two put off, and that the last four stay put off."""
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
    text = loop.run(folder, 2, words(world, folder, "carry")).text()
    assert_each_prompt_counts_once(folder / "run")
    # The last iteration's are named, and a run that resumes trains on them.
    assert "4 prompts that --rollout-tail carry put off were not trained on, nor were their 16 responses" in text
    assert text.count("put off were not trained on") == 1
    assert [line["prompts"]["put_off"] for line in read_metrics(folder / "run")] == [4, 8, 0, 4]
    left = verify(folder / "run").put_off
    assert left is not None
    assert [one.version for one in left] == [3] * 4
    named = re.search(r"16 responses: (.*)\. (\S*) holds them: a run that resumes from it", text)
    assert named is not None
    assert Path(named[2]) == folder / "save" / f"iter_{ITERATIONS:07d}"
    source = load_prompts(DataConfig(prompts=[world.prompts]), world.model, seed=0, longest=40, vocab_size=128)
    tokens = {prompt.row: hash_content(prompt.tokens) for prompt in source.peek(source.num_rows)}
    assert [tokens[row] for row in named[1].split(", ")] == [one.tokens for one in left]

    more = [*words(world, folder, "stop"), "--train-iters", str(ITERATIONS + 1), "--override-opt-param-scheduler"]
    assert "put off were not trained on" not in loop.run(folder, 2, more).text()
    assert verify(folder / "run").put_off == []
    last = next(event for event in reversed(loop.read_events(folder / "run")) if event["event"] == "submit")
    assert last["num_carried"] == 4
    assert last["prompts"][:4] == [one.tokens for one in left]


@pytest.mark.each_change
def test_responses_that_are_cut_off_are_trained_on_and_counted_as_truncated(world):
    folder = world.folder / "truncate"
    loop.run(folder, 2, words(world, folder, "truncate"))
    assert verify(folder / "run").breaches == []
    reasons = [
        {response["finish_reason"] for response in event["responses"]}
        for event in loop.read_events(folder / "run")
        if event["event"] == "group"
    ]
    assert 0 < sum("cut" in of_group for of_group in reasons) <= 4 * ITERATIONS
    assert any(line["responses"]["truncated"] > 0 for line in read_metrics(folder / "run"))


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
