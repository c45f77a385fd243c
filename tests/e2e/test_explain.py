"""`megatron-rl explain` names a fault planted in a run; of a healthy run it reports nothing."""

import contextlib
import dataclasses
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main
from tests.e2e import loop
from tests.ranks import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# A group takes some 70 ms to train on. Engines give enough to keep ranks busy, and no group is much later than the
# others.
HEALTHY_SCRIPT = {"lengths": [24, 48], "delay": [0.0, 0.3]}
HEALTHY = {
    "rollout_max_tokens": 64, "rollout_max_num_seqs": 32, "grpo_prompts_per_step": 16, "grpo_group_size": 8,
    "micro_batch_size": 8, "seq_length": 128, "train_iters": 9, "lr": 1e-5, "consume_order": None,
}  # fmt: skip

SLOW_REWARD = """
import time

def score(prompts, completions, completion_ids, **columns):
    time.sleep(0.25)
    return [float(sum(ids) % 3) for ids in completion_ids]
"""
FAVOURITE = """
def score(prompts, completions, completion_ids, **columns):
    return [float(ids.count(7)) for ids in completion_ids]
"""
TOO_LITTLE = re.compile(r"too little to judge where the time went: it needs (\d+) iterations")
MOST_ATTEMPTS = 3
# A conversation of two turns: each waits longer for its environment than for an engine.
SLOW_ENVIRONMENT = """
import time

class Slow:
    def reset(self, **row):
        self.turns = self.sum = 0

    def step(self, completion):
        time.sleep(1.5)
        self.turns += 1
        self.sum += sum(map(int, completion.split()))
        return "7" if self.turns < 2 else None

    def get_reward(self):
        return float(self.sum % 3)
"""
# A rank runs this before it begins.
SLOW_DISK = """
    import os, time
    original = os.fsync
    def fsync(descriptor):
        time.sleep(0.1)
        return original(descriptor)
    os.fsync = fsync
"""
SLOW_RANK = """
    import time, torch
    original = torch.nn.functional.embedding
    def embedding(*args, **options):
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
        return original(*args, **options)
    torch.nn.functional.embedding = embedding
"""
# Every process of the run runs this as it starts.
SLOW_ENGINE = """
import dataclasses, sys
if "megatron_rl.sidecar" in sys.orig_argv:
    from megatron_rl.sidecar.engines import scripted
    def create(self, name):
        delay = self._script.delay
        slow = dataclasses.replace(self._script, delay=lambda request: 3 * delay(request))
        return scripted.ScriptedEngine(name, slow if name == "engine-1" else self._script)
    scripted.ScriptedFactory.create = create
"""


@dataclasses.dataclass(frozen=True)
class Plant:
    """A fault of a run."""

    script: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reward: str | None = None
    environment: str | None = None
    num_ranks: int = 1
    faults: Mapping[int, str] = dataclasses.field(default_factory=dict)
    every_process: str | None = None
    follows: frozenset[str] = frozenset()
    """Findings that are a consequence."""


ALL_AT_ONCE = {"rollout_max_num_seqs": 128}
PLANTS = {
    "slow engine": Plant(every_process=SLOW_ENGINE, follows=frozenset({"starved", "tail", "first"})),
    "slow reward": Plant(reward=SLOW_REWARD, flags={"reward_workers": 4}, follows=frozenset({"tail", "first"})),
    "slow environment": Plant(environment=SLOW_ENVIRONMENT,
                              flags=ALL_AT_ONCE | {"rollout_max_tokens": 128, "seq_length": 256},
                              follows=frozenset({"environment", "tail", "first", "starved"})),
    "tail": Plant(script={"delay": [0.0, 3.0]}, flags=ALL_AT_ONCE),
    "starved": Plant(script={"delay": [0.3, 0.6]}, flags={"rollout_num_engines": 1, "rollout_max_num_seqs": 8}),
    "checkpoint": Plant(flags={"save": "checkpoints", "save_interval": 1}, faults={0: SLOW_DISK}),
    # Scripted engines sample at random: their estimate of the policy's entropy means nothing, and neither does the
    # mismatch.
    "entropy": Plant(reward=FAVOURITE, flags={"lr": 2e-3, "train_iters": 16, "grpo_entropy_coef": 1e-6},
                     follows=frozenset({"mismatch"})),
    "truncated": Plant(script={"lengths": [64, 64]}),
    "uneven replicas": Plant(num_ranks=2, flags={"consume_order": "prompt", "grpo_prompts_per_step": 24},
                             faults={1: SLOW_RANK},
                             follows=frozenset({"bubble", "tail", "starved", "first"})),
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> loop.World:
    return make_world(tmp_path_factory.mktemp("world"))


def make_world(folder: Path) -> loop.World:
    """Make the world as in other tests, with a model that takes some time to train."""
    world = loop.make_world(folder, 200)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4}
    return dataclasses.replace(world, model=loop.draw_model(folder / "large", head_dim=32, **sizes))


def find(world: loop.World, name: str, plant: Plant) -> list[str]:
    """Return the sentences about the run; one that is too short to judge, as on a busy machine, is made longer."""
    for attempt in range(MOST_ATTEMPTS):
        sentences = explain(world, f"{name}-{attempt}", plant)
        wanted = next((int(found[1]) for said in sentences if (found := TOO_LITTLE.search(said))), None)
        if wanted is None:
            break
        # The first iteration does not count, and the longer run may find times that differ more.
        plant = dataclasses.replace(plant, flags={**plant.flags, "train_iters": 1 + 2 * wanted})
    return sentences


def explain(world: loop.World, name: str, plant: Plant) -> list[str]:
    """Return the sentences about a new run."""
    folder = world.folder / name
    folder.mkdir()
    script = folder / "script.json"
    script.write_text(json.dumps(HEALTHY_SCRIPT | plant.script))
    changes = HEALTHY | {"rollout_script": script} | plant.flags
    if plant.reward is not None:
        (folder / "reward.py").write_text(plant.reward)
        changes["reward"] = f"{folder / 'reward.py'}:score"
    if plant.environment is not None:
        (folder / "environment.py").write_text(plant.environment)
        changes |= {"reward": None, "reward_workers": None, "rollout_env": f"{folder / 'environment.py'}:Slow"}
    if "save" in changes:
        changes["save"] = folder / changes["save"]
    environment = {}
    if plant.every_process is not None:
        (folder / "sitecustomize.py").write_text(plant.every_process)
        environment["PYTHONPATH"] = f"{folder}:{ROOT}"
    words = world.words(name, **changes)
    with loop.running(folder, plant.num_ranks, words, plant.faults, is_forked=not environment, **environment) as ranks:
        assert ranks.wait() == [0] * plant.num_ranks, ranks.text()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["explain", str(world.folder / "runs" / name)]) == 0
    return output.getvalue().splitlines()


def test_a_healthy_run_has_no_findings(world) -> None:
    assert find(world, "healthy", Plant()) == []


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_named(world, name) -> None:
    sentences = find(world, name.replace(" ", "-"), PLANTS[name])
    names = {sentence.partition(":")[0] for sentence in sentences}
    assert name in names, sentences
    assert names - {name} <= PLANTS[name].follows, sentences
