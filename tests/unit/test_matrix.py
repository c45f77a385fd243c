"""The matrix of versions: its parts, and that a failure on one version is not lost in it."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.documents import ROOT, read
from tests.matrix import across
from tools import run_matrix

VERSIONS = [version for version in run_matrix.ENVIRONMENTS if version != run_matrix.MAIN]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_environment_holds_the_version_that_it_is_named_after(version):
    number = version.split()[0]
    assert run_matrix.ENVIRONMENTS[version] == f".venv-mcore-{number}"
    assert f"\nmegatron-core=={number}\n" in read(f"requirements/megatron-core-{number}.lock")


def test_make_installs_each_version_and_the_documents_have_a_row_for_it():
    (listed,) = re.findall(r"^MCORE_VERSIONS := (.*)$", read("Makefile"), re.MULTILINE)
    assert [run_matrix.REFERENCE, *listed.split()] == VERSIONS
    rows = re.findall(r"^\| (\d\S*) \|.* \d+ of \d+ equal", read("docs/platforms.md"), re.MULTILINE)
    assert rows == listed.split()


def test_every_test_that_the_matrix_runs_exists():
    for words in (*run_matrix.PARTS.values(), *run_matrix.QUICK.values()):
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))


@pytest.fixture
def matrix(tmp_path, monkeypatch):
    """Make the matrix over parts that end as they are told to; all others end well."""
    monkeypatch.setattr(run_matrix, "OUT", tmp_path)
    well = {
        "loop": (0, "...\n3 passed, 1 deselected in 2 s"),
        "numbers": (0, ""),
        "compare": (0, compared({})),
        "reads": (0, ""),
    }

    def of(**outputs: tuple[int, str]) -> int:
        def run(version, part, words):
            if part == "reads":
                folder = Path(words[2]) / version
                folder.mkdir()
                (folder / "read.json").write_text(json.dumps({run_matrix.REFERENCE: []}))
            code, output = {**well, **outputs}[part]
            return code, 1.0, output

        monkeypatch.setattr(run_matrix, "run", run)
        monkeypatch.setattr(sys, "argv", ["run_matrix", "--quick", "0.19.2"])
        return run_matrix.main()

    return of


def compared(different: dict[str, float]) -> str:
    return json.dumps({"0.19.2": {"tensors": 9, "different": different}})


def test_a_part_that_fails_fails_the_matrix_and_is_in_the_table(matrix, capsys):
    assert matrix() == 0
    assert "| 0.19.2 | 3 passed, 1 s | 9 of 9 equal, 1 s | 1 of 1, 1 s |" in capsys.readouterr().out
    assert matrix(loop=(1, "a traceback\n1 failed, 2 passed in 2 s")) == 1
    printed = capsys.readouterr().out
    assert "a traceback" in printed
    assert "| 0.19.2 | 1 failed, 2 passed, 1 s |" in printed
    assert matrix(loop=(2, "")) == 1
    assert "| 0.19.2 | exit code 2, 1 s |" in capsys.readouterr().out
    assert matrix(compare=(0, compared({"a gradient": 1e-7, "another": 1e-8}))) == 1
    assert "| 7 of 9 equal, the others within 1e-07, 1 s |" in capsys.readouterr().out
    assert matrix(reads=(1, "a traceback")) == 1
    assert "| failed, 1 s |" in capsys.readouterr().out


def test_a_number_that_differs_is_counted_with_its_size(tmp_path):
    for name, value in (("one", 2.0), ("other", 2.5)):
        (tmp_path / name).mkdir()
        numbers = {"weights": torch.tensor([1.0, value]), "loss": torch.tensor(3.0)}
        torch.save(numbers, tmp_path / name / "numbers.pt")
    found = across.compare(tmp_path, "one")
    assert found["one"] == {"tensors": 2, "different": {}}
    assert found["other"] == {"tensors": 2, "different": {"weights": 0.25}}
