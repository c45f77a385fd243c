"""The available patches and the trees that they are for: `patches` has a folder for each upstream.

An upstream's `tree.toml` says by which files it is recognized; beside it lie its patches, each NAME.diff and NAME.toml.
"""

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.patching.diff import Hunk, read_hunks

FOLDER = Path(__file__).resolve().parents[2] / "patches"


@dataclasses.dataclass(frozen=True)
class FilePatch:
    """A change to one file."""

    name: str
    file: str
    reason: str
    until: str
    """The event after which nobody needs the patch."""
    marker: str
    """A text that only a patched file has."""
    blobs: Mapping[str, tuple[str, ...]]
    """The files that it was made for: git's hash, and the tags that have it."""
    hunks: tuple[Hunk, ...]


@dataclasses.dataclass(frozen=True)
class Upstream:
    """A known tree. It is recognized by its files, since forks copy version numbers too."""

    name: str
    has: tuple[str, ...]
    anchors: Mapping[str, str]
    """Files, each with a text that only patchable versions have."""
    refused: str
    """Why the tree cannot be patched, if it cannot, or if an anchor is missing."""
    patches: tuple[FilePatch, ...]


def read_catalog(folder: Path = FOLDER) -> list[Upstream]:
    """Read all upstreams; a fork comes first, since it has the files of the original tree and its own."""
    if not folder.is_dir():
        raise InputError(f"{folder} must be a folder of patches: run megatron-rl from a clone, which holds it")
    upstreams = [_read_upstream(path.parent) for path in sorted(folder.glob("*/tree.toml"))]
    return sorted(upstreams, key=lambda upstream: bool(upstream.patches))


def _read_upstream(folder: Path) -> Upstream:
    content = _read(folder / "tree.toml")
    patches = tuple(_read_patch(path) for path in sorted(folder.glob("*.diff")))
    return Upstream(
        name=content["name"],
        has=tuple(content["has"]),
        anchors=content.get("anchors", {}),
        refused=content["refused"],
        patches=patches,
    )


def _read_patch(diff: Path) -> FilePatch:
    content = _read(diff.with_suffix(".toml"))
    return FilePatch(
        name=diff.stem,
        file=content["file"],
        reason=content["reason"],
        until=content["until"],
        marker=content["marker"],
        blobs={blob: tuple(tags) for blob, tags in content["blobs"].items()},
        hunks=tuple(read_hunks(diff.read_text(encoding="utf-8"))),
    )


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
