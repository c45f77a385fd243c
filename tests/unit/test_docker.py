"""The images of trainer and of engines are made of the environment that `make cuda` installs."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl import versions
from megatron_rl.sidecar.hosts import DEFAULT_PORT
from tests.processes import ROOT, run_python

TRAINER, ENGINES = "Dockerfile", "engines.Dockerfile"
each_file = pytest.mark.parametrize("file", [TRAINER, ENGINES])
# Those of Docker's reference that a file of ours may use.
INSTRUCTIONS = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "EXPOSE", "ENTRYPOINT", "CMD"}


def instructions(file: str) -> Iterator[tuple[str, str]]:
    """Yield each instruction of a Dockerfile with its text, continued lines joined."""
    text = (ROOT / "docker" / file).read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        yield name, rest


@each_file
def test_every_line_is_an_instruction_and_the_first_names_the_tested_python(file: str) -> None:
    found = list(instructions(file))
    assert {name for name, _ in found} <= INSTRUCTIONS
    name, image = found[0]
    assert name == "FROM"
    assert re.fullmatch(r"python:(3\.\d+)-slim-\w+", image)[1] == "3.12"
    assert "3.12" in versions.TESTED_PYTHONS
    assert not image.endswith("latest")


@each_file
def test_shell_commands_are_well_formed_and_copied_files_exist(file: str) -> None:
    for name, text in instructions(file):
        if name == "RUN":
            assert shlex.split(text)
        elif name == "COPY":
            *sources, _ = text.split()
            assert all((ROOT / source).exists() for source in sources), text


def test_the_image_holds_the_lock_of_make_cuda_and_this_project() -> None:
    runs = [text for name, text in instructions(TRAINER) if name == "RUN"]
    assert any("--no-deps" in text and "--requirement requirements/cuda.lock" in text for text in runs)
    assert any("--no-deps" in text and "--editable ." in text for text in runs)
    order = [text for _, text in instructions(TRAINER)]
    # What changes seldom comes first.
    assert order.index("requirements/cuda.lock requirements/cuda.lock") < order.index(". .")
    assert "$(CUDA_VENV) requirements/cuda.lock 3.12" in (ROOT / "Makefile").read_text()


def test_the_image_of_engines_leaves_out_only_packages_that_no_agent_and_no_engine_imports() -> None:
    (install,) = (text for name, text in instructions(ENGINES) if name == "RUN" and "cuda.lock" in text)
    (pattern,) = re.findall(r"'\^\(([a-z|-]+)\)=='", install)
    packages = pattern.split("|")
    lock = (ROOT / "requirements" / "cuda.lock").read_text()
    assert all(re.search(rf"^{package}==", lock, re.MULTILINE) for package in packages)
    modules = ["megatron" if package == "megatron-core" else package for package in packages]
    loaded = ["agent.main", "vllm.server", "vllm.factory", "vllm.worker", "vllm.api_server"]
    run_python(f"""
        import importlib, sys
        sys.modules.update(dict.fromkeys({modules}))
        for name in {loaded}:
            importlib.import_module("megatron_rl.sidecar." + name)
    """)
    (entry,) = (text for name, text in instructions(ENGINES) if name == "ENTRYPOINT")
    assert json.loads(entry) == ["python", "-m", "megatron_rl.sidecar.agent"]
    (ports,) = (text for name, text in instructions(ENGINES) if name == "EXPOSE")
    assert ports.split() == [str(DEFAULT_PORT), str(DEFAULT_PORT + 1)]


def test_what_git_ignores_does_not_travel_into_the_image() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    assert ignored <= left_out
    assert {".git"} <= left_out
    assert not any(Path(name).name == "megatron_rl" for name in left_out)
