"""The wheel, installed without the clone: it starts a run, has the pages that it cites, and names missing packages."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_rl.errors import ExitCode
from tests.processes import ROOT

pytestmark = pytest.mark.each_change
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "megatron_rl", "docs")


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment whose other packages are those of this one, without this clone."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy)
    pip = [sys.executable, "-m", "pip"]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    build = ["wheel", *options, "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run([*pip, *build], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", *options, "--no-compile", str(wheel)], check=True)
    return python.parent


def add_packages(bin_folder: Path) -> None:
    """Let the environment import the packages of this one. The wheel's own copy of megatron_rl comes first."""
    above = bin_folder.parent / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (above / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n")


def run(bin_folder: Path, *words: str, place: Path, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in `place`; modules in `first` are found before those of packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if first is not None:
        environment["PYTHONPATH"] = str(first)
    command = [str(bin_folder / words[0]), *words[1:]]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_needs_no_clone(bin_folder: Path, tmp_path: Path) -> None:
    usage = run(bin_folder, "megatron-rl", "--help", place=tmp_path)
    assert usage.returncode == ExitCode.OK, usage.stderr
    (line,) = (line for line in usage.stdout.splitlines() if "docs/NAME.md" in line)
    docs = Path(line.rpartition(" are in ")[2].removesuffix("."))
    assert bin_folder.parent in docs.parents
    assert {page.name for page in docs.glob("*.md")} == {page.name for page in (ROOT / "docs").glob("*.md")}
    # The environment lacks all packages that commands need.
    for words in (["explain", "run"], ["launch", "slurm", "--", "pretrain_grpo.py"], ["translate", "x.sh"]):
        lacking = run(bin_folder, "megatron-rl", *words, place=tmp_path)
        assert lacking.returncode == ExitCode.ENVIRONMENT, lacking.stderr
        assert "is not installed: pip install" in lacking.stderr
        assert "Traceback" not in lacking.stderr
    for module in ("sidecar", "sidecar.agent", "config"):
        lacking = run(bin_folder, "python", "-m", f"megatron_rl.{module}", "--help", place=tmp_path)
        assert lacking.returncode == ExitCode.ENVIRONMENT, lacking.stderr
        assert f"megatron_rl.{module}: the package " in lacking.stderr
        assert "Traceback" not in lacking.stderr
    add_packages(bin_folder)
    shown = run(bin_folder, "python", "-m", "megatron_rl", "--platform", "cpu", "--hf-modle", "m", place=tmp_path)
    assert shown.returncode == ExitCode.USAGE
    assert "unknown flag --hf-modle (the nearest is --hf-model)" in shown.stderr
    # A machine that only submits jobs may lack torch.
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    words = ["launch", "slurm", "--engine-hosts", "1", "--dry-run", "--", "pretrain_grpo.py", "--save", "maths"]
    launched = run(bin_folder, "megatron-rl", *words, place=tmp_path, first=tmp_path / "lacking")
    assert launched.returncode == ExitCode.OK, launched.stderr
    assert "the run's flags were not checked: the package torch is not installed" in launched.stderr
    where = run(bin_folder, "python", "-c", "import megatron_rl; print(megatron_rl.__file__)", place=tmp_path)
    assert bin_folder.parent in Path(where.stdout.strip()).parents
