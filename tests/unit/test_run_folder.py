"""The folder that a command reads, and its error for a folder that holds another kind of run."""

import json
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.errors import ExitCode
from megatron_rl.observe import run_folder
from megatron_rl.observe.run_folder import SavedConfig, Value


def write_run(folder: Path, stage: str) -> Path:
    """Write a run's metrics and configuration, without an audit log."""
    folder.mkdir(parents=True)
    config = SavedConfig(sections={"run": {"stage": Value(stage, f"--stage {stage}")}})
    run_folder.write_saved_config(folder / run_folder.CONFIG_FILE, config)
    lines = [{"version": version, "loss": 1.0, "demonstrations": 8} for version in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_audit_says_that_a_supervised_run_has_no_rollouts(tmp_path, capsys, is_saved):
    run = write_run(tmp_path / "save" / "rollout" / "warm-up", "sft")
    assert cli.main(["audit", str(tmp_path / "save" if is_saved else run)]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert f"{run} is a run of --stage sft, which samples nothing" in said
    assert "name a run of --stage grpo" in said


def test_a_run_of_rollouts_without_its_audit_log_is_said_to_lack_it(tmp_path, capsys):
    run = write_run(tmp_path / "run", "grpo")
    assert cli.main(["audit", str(run)]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "has no audit.jsonl" in said
    assert "sft" not in said


@pytest.mark.parametrize("command", ["explain", "picture"])
def test_a_command_finds_the_run_one_level_down(tmp_path, capsys, command):
    write_run(tmp_path / "demo" / "run", "sft")
    assert cli.main([command, str(tmp_path / "demo")]) == ExitCode.OK
    assert "iteration" in capsys.readouterr().out


def test_a_folder_with_several_runs_lists_them(tmp_path, capsys):
    runs = [write_run(tmp_path / "demo" / name, "sft") for name in ("first", "second")]
    assert cli.main(["explain", str(tmp_path / "demo")]) == ExitCode.USAGE
    text = capsys.readouterr().err
    assert all(str(run) in text for run in runs)


def test_a_run_found_one_level_down_is_labelled_by_the_folder_that_was_named(tmp_path):
    runs = [write_run(tmp_path / name / "run", "sft") for name in ("demo", "other")]
    labelled = run_folder.label_runs([str(run.parent) for run in runs], "metrics.jsonl")
    assert labelled == {"demo": runs[0], "other": runs[1]}
