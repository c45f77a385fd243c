"""The versions of other packages that this one is written for, checked when a process starts."""

import dataclasses
import importlib.metadata
import re
import sys

from megatron_rl.errors import PlatformError


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A package with the first version that works and the first that is not known to."""

    package: str
    at_least: str
    below: str
    remedy: str

    @property
    def wanted(self) -> str:
        return f">={self.at_least},<{self.below}"

    def accepts(self, version: str) -> bool:
        return release(self.at_least) <= release(version) < release(self.below)


PYTHON = Requirement("python", "3.11", "3.15", "start with another python")
MEGATRON_CORE = Requirement("megatron-core", "0.16", "0.20", "pip install 'megatron-core>=0.16,<0.20'")
TORCH = Requirement("torch", "2.6", "3", "install torch 2.6 or newer, in the build for your device")
REQUIREMENTS = (PYTHON, TORCH, MEGATRON_CORE)


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, so that 2.13.0+cpu and 0.16.1rc0 compare as 2.13.0 and 0.16.1."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise PlatformError(f"{version!r} is not a version that can be compared; it should start with a number")
    return tuple(int(part) for part in match[0].split("."))


def installed(package: str) -> str | None:
    """The version of a package, None where it is not installed."""
    if package == "python":
        return ".".join(str(part) for part in sys.version_info[:3])
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem(requirement: Requirement) -> str | None:
    """What is wrong with a package, None if nothing is."""
    version = installed(requirement.package)
    if version is None:
        return f"{requirement.package} is not installed, wanted {requirement.wanted}: {requirement.remedy}"
    if not requirement.accepts(version):
        return f"{requirement.package} is {version}, wanted {requirement.wanted}: {requirement.remedy}"
    return None


def check() -> None:
    """Raise for the packages that are missing or of a version outside the range, all of them in one message."""
    problems = [text for text in map(problem, REQUIREMENTS) if text is not None]
    if problems:
        raise PlatformError("; ".join(problems))
