"""A whole run with a loss, an advantage and a metric of a user's file."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.algorithm.plug_ins import describe_plug_ins
from megatron_rl.algorithm.settings import AlgorithmConfig
from megatron_rl.errors import ExitCode
from megatron_rl.observe import run_folder
from megatron_rl.observe.metrics import read_metrics, without_times
from megatron_rl.shared.records.audit_check import verify
from tests.e2e import loop
from tests.processes import ROOT

EXAMPLE = ROOT / "examples" / "algorithms" / "ce_gppo.py"


def find_events(run: Path, kind: str) -> Iterator[dict]:
    events = loop.read_events(run)
    return (event for event in events if event["event"] == kind)


@pytest.mark.each_change
def test_a_run_trains_with_functions_of_its_own_and_does_not_resume_once_their_file_has_changed(tmp_path) -> None:
    world, file = loop.make_world(tmp_path), tmp_path / "own.py"
    shutil.copy(EXAMPLE, file)
    words = {
        "grpo_loss": f"{file}:ce_gppo", "grpo_advantage": f"{file}:centered_ranks", "grpo_metric": f"{file}:kept",
        "grpo_clamp_eps_lower": 0.01, "grpo_clamp_eps_upper": 0.01, "global_batch_size": 8, "save_interval": 1,
    }  # fmt: skip
    whole, part = (tmp_path / name / "run" for name in ("whole", "part"))
    for folder, end in ((whole, None), (part, 2)):
        places = {"rollout_folder": folder, "save": folder.parent / "ckpt", "exit_interval": end}
        loop.run(folder.parent, 1, world.words("run", **words, **places))
    lines = read_metrics(whole)
    assert all(0 < line["metric"]["kept"] < 1 for line in lines)
    recorded = run_folder.read_saved_config(whole / run_folder.CONFIG_FILE).sections["plug-ins"]
    config = AlgorithmConfig(loss=words["grpo_loss"], advantage=words["grpo_advantage"], metrics=[words["grpo_metric"]])
    assert {name: value.text for name, value in recorded.items()} == describe_plug_ins(config)

    events = list(find_events(whole, "plug_ins"))
    assert [event["version"] for event in events] == [0, 1, 2]
    assert all(event["sha256"] == describe_plug_ins(config) for event in events)
    assert verify(whole).breaches == []

    resumed = {**words, "rollout_folder": part, "save": part.parent / "ckpt", "load": part.parent / "ckpt"}
    before = file.read_text()
    file.write_text(before.replace("KEEP_LOW, KEEP_HIGH = 0.75", "KEEP_LOW, KEEP_HIGH = 0.5"))
    ranks = loop.run(part.parent, 1, world.words("run", **resumed), code=ExitCode.INPUT)
    assert f"--grpo-loss {file}:ce_gppo: the file has changed since" in ranks.text()
    file.write_text(before)
    loop.run(part.parent, 1, world.words("run", **resumed))
    assert without_times(read_metrics(part)) == without_times(lines)
