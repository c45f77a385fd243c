"""Build environments that hold the packages that an extra of this project requires, and nothing else.

Packages are linked from the environment of the tests, so the heavy ones are not installed again.
"""

import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from tests.ranks import ROOT


def read_requirements(folder: Path) -> list[Requirement]:
    """Read the metadata that setup.py gives this project: its requirements, with those of extras."""
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    metadata = importlib.metadata.PathDistribution(folder / "megatron_rl.egg-info")
    return [Requirement(text) for text in metadata.requires or ()]


def find_closure(requirements: Iterable[Requirement], extras: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Follow the metadata of installed packages; return names with versions, and the names that are not installed.

    A version outside the range that asks for it is an error.
    """
    found: dict[str, str] = {}
    missing: set[str] = set()
    waiting = [(requirement, frozenset(extras)) for requirement in requirements]
    seen = set()
    while waiting:
        requirement, wanted = waiting.pop()
        if (str(requirement), wanted) in seen:
            continue
        seen.add((str(requirement), wanted))
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in {"", *wanted}):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        try:
            metadata = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            missing.add(name)
            continue
        assert requirement.specifier.contains(metadata.version, prereleases=True), f"{requirement}: {metadata.version}"
        found[name] = metadata.version
        waiting += [(Requirement(text), frozenset(requirement.extras)) for text in metadata.requires or ()]
    return found, missing


def make_environment(folder: Path, names: Iterable[str]) -> Path:
    """Make an environment with these packages and this project; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    paths = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=paths))
    owners = _find_owners()
    for name in names:
        _link(importlib.metadata.distribution(name), owners, packages)
    (packages / "megatron_rl").symlink_to(ROOT / "megatron_rl")
    return python


@functools.cache
def _find_owners() -> dict[PurePosixPath, set[int]]:
    """Find the installed packages that have files in each folder, by number."""
    owners: dict[PurePosixPath, set[int]] = defaultdict(set)
    for owner, distribution in enumerate(importlib.metadata.distributions()):
        for path in distribution.files or ():
            for parent in path.parents:
                owners[parent].add(owner)
    return owners


def _link(distribution: importlib.metadata.Distribution, owners: dict[PurePosixPath, set[int]], packages: Path) -> None:
    """Link a package's files, or whole folders if all their files belong to this package."""
    assert distribution.files, f"{distribution.name} does not list its files"
    for path in distribution.files:
        if path.parts[0] == "..":
            # A script, which no test starts.
            continue
        folders = [parent for parent in reversed(path.parents) if parent.parts]
        whole = next((parent for parent in folders if len(owners[parent]) == 1), path)
        link = packages / whole
        if not os.path.lexists(link):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(distribution.locate_file(whole))


def run(python: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter without this process's settings for imports."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(python), *words], cwd=ROOT, env={**kept, **environment}, capture_output=True, text=True, timeout=900
    )
