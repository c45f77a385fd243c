"""The image of trainer and engines is made of the environment that `make cuda` installs."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from megatron_rl import versions
from tests.processes import ROOT

# Those of Docker's reference that a file of ours may use.
INSTRUCTIONS = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "CMD"}


def instructions() -> Iterator[tuple[str, str]]:
    """Yield each instruction of the Dockerfile with its text, continued lines joined."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.partition(" ")
        yield name, rest


def test_every_line_is_an_instruction_and_the_first_names_the_tested_python() -> None:
    found = list(instructions())
    assert {name for name, _ in found} <= INSTRUCTIONS
    name, image = found[0]
    assert name == "FROM"
    assert re.fullmatch(r"python:(3\.\d+)-slim-\w+", image)[1] == "3.12"
    assert "3.12" in versions.TESTED_PYTHONS
    assert not image.endswith("latest")


def test_shell_commands_are_well_formed_and_copied_files_exist() -> None:
    for name, text in instructions():
        if name == "RUN":
            assert shlex.split(text)
        elif name == "COPY":
            *sources, _ = text.split()
            assert all((ROOT / source).exists() for source in sources), text


def test_the_image_holds_the_lock_of_make_cuda_and_this_project() -> None:
    runs = [text for name, text in instructions() if name == "RUN"]
    assert any("--no-deps" in text and "--requirement requirements/cuda.lock" in text for text in runs)
    assert any("--no-deps" in text and "--editable ." in text for text in runs)
    order = [text for _, text in instructions()]
    # What changes seldom comes first.
    assert order.index("requirements/cuda.lock requirements/cuda.lock") < order.index(". .")
    assert "$(CUDA_VENV) requirements/cuda.lock 3.12" in (ROOT / "Makefile").read_text()


def test_what_git_ignores_does_not_travel_into_the_image() -> None:
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()}
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().split()}
    assert ignored <= left_out
    assert {".git"} <= left_out
    assert not any(Path(name).name == "megatron_rl" for name in left_out)
