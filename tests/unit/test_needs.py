"""The packages that this one requires are those that it imports, in the lock files' releases and in setup.py's."""

import ast
import re
import sys
from pathlib import Path

import pytest

from megatron_rl import versions
from tests import extras
from tests.ranks import ROOT

GROUPS = (
    "always", "cpu", "cuda", "npu", "math", "parquet", "picture", "ray", "report", "tensorboard", "translate",
    "tinker", "verifiers",
)  # fmt: skip
# Imported if installed, and named by an error if needed; jinja2 comes with torch, and verl imports what imports it.
FREE = {
    "fla",
    "flash_attn",
    "jinja2",
    "jsonschema",
    "mindspeed",
    "transformer_engine",
    "triton",
    "verl",
    "wandb",
    "vllm_ascend",
}


def read_lock(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", path.read_text().lower().replace("_", "-"), re.MULTILINE))


@pytest.mark.parametrize("name", ["cpu.lock", "python312.lock", "npu.lock", "cuda.lock", "launch.lock", "tinker.lock"])
def test_the_releases_that_tests_run_with_are_within_the_ranges(name):
    lock = read_lock(ROOT / "requirements" / name)
    # The cookbook's recipe asks for an older release of verifiers than this package's own environments.
    groups = [group for group in GROUPS if (name, group) != ("tinker.lock", "verifiers")]
    needs = [need for group in groups for need in versions.read_needs(group) if need.package in lock]
    assert needs
    for need in needs:
        assert need.is_tested(lock[need.package]), need


@pytest.mark.parametrize(("name", "platform"), [("cpu.lock", "cpu"), ("cuda.lock", "cuda")])
def test_the_environments_of_the_demos_hold_all_that_commands_need(name, platform):
    lock = read_lock(ROOT / "requirements" / name)
    # A Ray cluster brings its own, and Tinker's client has an environment of its own.
    for group in {*GROUPS} - {"cpu", "cuda", "npu", "ray", "tinker"} | {platform}:
        for need in versions.read_needs(group):
            assert need.package in lock


def test_every_package_that_is_imported_is_asked_for():
    imported = set()
    for path in (ROOT / "megatron_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    asked = {need.module for group in GROUPS for need in versions.read_needs(group)}
    assert {"uvicorn", "torch"} <= imported
    assert imported - set(sys.stdlib_module_names) - {"megatron_rl"} <= asked | FREE


def test_the_extras_are_those_that_the_doctor_knows(tmp_path):
    requirements = extras.read_requirements(tmp_path)
    for group in GROUPS:
        marker = None if group == "always" else f'extra == "{group}"'
        found = {
            (one.name, str(one.specifier))
            for one in requirements
            if (None if one.marker is None else str(one.marker)) == marker
        }
        known = {(need.package, need.tested) for need in versions.read_needs(group)}
        assert {(name, frozenset(text.split(","))) for name, text in found} == {
            (name, frozenset(text.split(","))) for name, text in known
        }


def test_setup_asks_for_the_python_that_a_start_asks_for():
    text = (ROOT / "setup.py").read_text()
    assert f'python_requires="{versions.PYTHON.wanted}"' in text


@pytest.mark.parametrize(
    ("tested", "version", "is_tested"),
    [
        (">=0.54.0,<0.55", "0.54.3", True),
        (">=0.54.0,<0.55", "0.55.0", False),
        (">=0.54.0,<0.55", "0.53.9", False),
        ("==2.13.0", "2.13.0+cpu", True),
        ("==2.13.0", "2.11.0+cu130", True),
        ("==2.13.0", "2.14.1", False),
    ],
)
def test_a_release_is_tested_if_it_is_in_the_range_or_has_run_besides(tested, version, is_tested):
    assert versions.Need("torch", tested, also=("2.11.0",)).is_tested(version) == is_tested
