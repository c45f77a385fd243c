"""The folder that a command reads, the errors for folders of other runs, and the warnings that a run leaves there."""

import json
import logging
import warnings
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.errors import ExitCode
from megatron_rl.observe import run_folder
from megatron_rl.observe.run_folder import SavedConfig, Value, keep_warnings
from megatron_rl.shared.records.audit_log import AuditLog


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


@pytest.mark.parametrize("place", ["", "rollout"], ids=["one level up", "the folder that --save was given"])
@pytest.mark.parametrize("command", ["audit", "explain", "picture"])
def test_a_command_finds_the_run_below_its_folder_and_lists_several(tmp_path, capsys, command, place):
    runs = [tmp_path / "save" / place / name for name in ("first", "second")]
    for run, code in zip(runs, (ExitCode.OK, ExitCode.USAGE), strict=True):
        write_run(run, "grpo")
        AuditLog(run / "audit.jsonl", "run").close()
        assert cli.main([command, str(tmp_path / "save")]) == code
    said = capsys.readouterr()
    assert "iteration" in said.out
    assert f"{tmp_path / 'save'} has 2 runs: name one of\n  {runs[0]}\n  {runs[1]}\n" in said.err


def test_a_run_found_one_level_down_is_labelled_by_the_folder_that_was_named(tmp_path):
    runs = [write_run(tmp_path / name / "run", "sft") for name in ("demo", "other")]
    labelled = run_folder.label_runs([str(run.parent) for run in runs], "metrics.jsonl")
    assert labelled == {"demo": runs[0], "other": runs[1]}
    saved = write_run(tmp_path / "save" / "rollout" / "first", "grpo")
    assert run_folder.label_runs([str(tmp_path / "save")], "metrics.jsonl") == {"first": saved}


def test_warnings_and_logged_ones_are_in_the_file_and_said_once(tmp_path, capfd, recwarn):
    path, said = tmp_path / "warnings.log", []
    with keep_warnings(path, said.append):
        warnings.warn("this will be removed", FutureWarning, stacklevel=1)
        logging.getLogger("some.package").warning("half of it is slow")
        logging.getLogger("some.package").info("nothing to see")
    text = path.read_text()
    assert "FutureWarning: this will be removed" in text
    assert "some.package WARNING half of it is slow" in text
    assert "nothing to see" not in text
    assert said == [f"other packages have warnings: {path} (--verbose shows them here)"]
    assert capfd.readouterr() == ("", "")


def test_without_a_warning_no_file_is_written(tmp_path):
    with keep_warnings(tmp_path / "warnings.log", lambda text: None):
        pass
    assert not list(tmp_path.iterdir())


def test_warnings_are_printed_when_the_file_cannot_be_written(tmp_path, capfd):
    with keep_warnings(tmp_path / "absent" / "warnings.log", lambda text: None):
        logging.getLogger("some.package").warning("half of it is slow")
    assert "half of it is slow" in capfd.readouterr().err


def test_after_the_context_warnings_go_where_they_went_before(tmp_path):
    before = logging.getLogger().handlers[:], warnings.showwarning
    with keep_warnings(tmp_path / "warnings.log", lambda text: None):
        assert warnings.showwarning is not before[1]
    assert (logging.getLogger().handlers, warnings.showwarning) == before
