"""The figures of the house: what is counted, and what is reported."""

import subprocess
from pathlib import Path

import pytest

from tools import check_house

FILES = {
    "megatron_rl/__init__.py": "",
    "megatron_rl/__main__.py": "def f():\n    from megatron_rl.trainer.loop import train\n",
    "megatron_rl/trainer/__init__.py": "",
    "megatron_rl/trainer/loop.py": "from typing import TYPE_CHECKING\nfrom megatron_rl.shared import part\n"
    "if TYPE_CHECKING:\n    from megatron_rl.sidecar import main\n",
    "megatron_rl/shared/__init__.py": "",
    "megatron_rl/shared/part.py": "X = 1\n",
    "megatron_rl/sidecar/__init__.py": "",
    "megatron_rl/sidecar/main.py": "from megatron_rl.shared import part\n" + "Y = 1\n" * 100,
    "megatron_rl/sidecar/vllm/__init__.py": "",
    "megatron_rl/sidecar/vllm/api_server.py": "",
    "megatron_rl/sidecar/vllm/worker.py": "",
    "tests/test_a.py": "Z = 1\n",
    "docs/a.md": "two words",
    "docs/flags.md": "words that are generated",
    "README.md": "one\nline\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def test_what_a_process_may_import_is_counted_also_within_functions_and_not_for_types(tree):
    package = check_house.Package(tree)
    assert package.list_imported(["megatron_rl.__main__"]) == {
        "megatron_rl", "megatron_rl.__main__", "megatron_rl.trainer", "megatron_rl.trainer.loop",
        "megatron_rl.shared", "megatron_rl.shared.part",
    }  # fmt: skip
    # Two modules import `part`, none imports `main` when it runs, and only `loop` has one importer.
    assert package.list_small() == ["megatron_rl.trainer.loop"]


def test_figures_are_those_of_the_tree(tree):
    figures = check_house.measure(tree)
    assert figures["package"] == {
        "files": 11, "lines": 108, "small_modules_with_one_importer": 1, "modules_of_the_trainer": 6,
        "modules_of_a_run_on_one_host": 11, "lines_of_a_run_on_one_host": 108,
    }  # fmt: skip
    assert figures["rooms"] == {"__main__": 2, "megatron_rl": 0, "shared": 1, "sidecar": 101, "trainer": 4}
    assert figures["others"] == {"lines_of_tests": 1, "pages": 1, "words_of_pages": 2, "lines_of_readme": 2}


def test_a_figure_above_its_bound_and_one_without_are_reported_and_bounds_only_fall(tree):
    figures = check_house.measure(tree)
    assert check_house.compare(figures, figures) == []
    (tree / "megatron_rl" / "sidecar" / "more.py").write_text("A = 1\n")
    (tree / "megatron_rl" / "room.py").write_text("A = 1\n")
    (tree / "README.md").write_text("short\n")
    higher = check_house.measure(tree)
    found = check_house.compare(higher, figures)
    assert [text.split(":")[0] for text in found] == [
        "package.files is 13, above 11", "package.lines is 110, above 108",
        "rooms.room is 1 and has no bound", "rooms.sidecar is 102, above 101",
    ]  # fmt: skip
    written = check_house.write(higher, figures)
    assert "\nfiles = 11\n" in written
    assert "\nlines_of_readme = 1\n" in written
    assert "\nroom = 1\n" in written
