"""The command megatron-rl: its exit codes, and what the doctor says."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_rl import cli, versions
from megatron_rl.commands import doctor
from megatron_rl.errors import ExitCode, InputError, PlatformError, UsageError
from tests.processes import ROOT


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError, 2), (PlatformError, 3), (InputError, 4)], ids=["usage", "environment", "input"]
)
def test_an_error_a_person_can_mend_is_one_message_and_its_own_exit_code(monkeypatch, capsys, error, code):
    def fail(argv):
        raise error(f"what is wrong with {argv}")

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=fail))
    assert cli.main(["doctor", "--flag"]) == code
    assert capsys.readouterr().err == "megatron-rl doctor: what is wrong with ['--flag']\n"


def test_any_other_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=lambda argv: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_an_interrupt_is_one_message_and_no_traceback(monkeypatch, capsys):
    def wait(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=wait))
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "megatron-rl doctor: interrupted\n"


def test_an_unknown_command_is_refused_with_the_list(capsys):
    assert cli.main(["docter"]) == ExitCode.USAGE
    assert "unknown command 'docter'" in capsys.readouterr().err
    assert cli.main([]) == ExitCode.USAGE
    assert cli.main(["--help"]) == ExitCode.OK
    assert "doctor" in capsys.readouterr().out


def test_the_exit_codes_are_documented():
    text = (ROOT / "docs" / "operations.md").read_text()
    assert all(f"| {code.value} | {code.name} |" in text for code in ExitCode)


def test_the_doctor_finds_this_machine_usable_and_lists_what_is_changed():
    result = _doctor("--platform", "cpu", "--patches")
    assert result.returncode == ExitCode.OK, result.stderr
    for text in ("megatron-core", "wanted >=0.16,<0.20", "collectives          gloo", "torch.Tensor.cuda", "apex"):
        assert text in result.stdout


def test_the_doctor_without_torch_says_so_and_fails(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    result = _doctor(path=tmp_path)
    assert result.returncode == ExitCode.ENVIRONMENT
    assert "torch does not load (no torch here)" in result.stderr


def test_the_doctor_names_a_version_that_is_out_of_range(monkeypatch, capsys):
    monkeypatch.setattr(versions, "installed", lambda package: "0.21.0" if package == "megatron-core" else "3.12.0")
    assert any(re.search("megatron-core is 0.21.0 in .*, wanted >=0.16,<0.20", text) for text in doctor._print_needed())
    assert "0.21.0" in capsys.readouterr().out


def _doctor(*arguments, path=None):
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-m", "megatron_rl.cli", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_output_that_nobody_reads_to_its_end_is_no_error():
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "megatron_rl.cli", "--help"]
    ended = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_another_pipe_that_breaks_is_not_taken_for_the_output(monkeypatch):
    monkeypatch.setattr(cli, "_run", _break_pipe)
    with pytest.raises(BrokenPipeError):
        cli.main(["plan"])


def _break_pipe(arguments):
    raise BrokenPipeError
