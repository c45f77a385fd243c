"""A whole run over several sources of prompts."""

import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.records.append_file import read_lines
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.e2e import test_resume as resume

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def write_sources(world: loop.World) -> list[str]:
    """Write the prompts as two sources, of which the first has three of four turns."""
    lines = world.prompts.read_text().splitlines(keepends=True)
    math, games = world.folder / "math.jsonl", world.folder / "games.jsonl"
    math.write_text("".join(lines[:30]))
    games.write_text("".join(lines[30:]))
    return [f"{math}=3", f"{games}=1"]


def test_each_source_has_its_share_of_every_iteration_and_its_own_metrics(tmp_path) -> None:
    world = loop.make_world(tmp_path)
    words = world.words("whole-run", prompts=write_sources(world), prompts_held_out=8, eval_interval=1, train_iters=6)
    loop.run(tmp_path / "whole", 1, words)
    run = tmp_path / "runs" / "whole-run"
    of_updates = [line for line in read_metrics(run) if "reward" in line]
    assert len(of_updates) == 6
    for line in of_updates:
        sources = line["sources"]
        assert {name: source["groups"] for name, source in sources.items()} == {"math.jsonl": 6, "games.jsonl": 2}
        mean = sum(source["groups"] * source["reward"] for source in sources.values()) / 8
        assert line["reward"]["mean"] == pytest.approx(mean)
        held_out = line["evaluation"]["sources"]
        assert sum(source["num_prompts"] for source in held_out.values()) == line["evaluation"]["num_prompts"] == 8
    samples = {line["row"].partition(":")[0] for line in read_lines(run / "samples.jsonl")}
    assert samples <= {"math.jsonl", "games.jsonl"}


def test_a_run_over_several_sources_that_was_killed_resumes_as_if_it_had_not_been(tmp_path) -> None:
    world = loop.make_world(tmp_path)
    # Sources take turns in rounds of four: with seven prompts an iteration ends within one.
    changes = {"prompts": write_sources(world), "grpo_prompts_per_step": 7}
    whole = resume.uninterrupted(world, "whole", 1, **changes)
    folder = resume.killed(world, "killed", 1, {0: resume.fault("backward", "rank", call=10)}, **changes)
    resume.resumed(world, folder, 1, **changes)
    resume.assert_same(folder, whole)
    groups = [
        {name: source.num_groups for name, source in verify(run / "run").count_sources().items()}
        for run in (whole, folder)
    ]
    assert groups[0] == groups[1] == {"math.jsonl": 21, "games.jsonl": 7}
