"""`megatron-rl patch`: the smallest changes by which a tree's own scripts train with GRPO.

    megatron-rl patch TREE            change the files, and leave a receipt
    megatron-rl patch TREE --check    list the changes
    megatron-rl patch TREE --undo     restore the files
    megatron-rl patch TREE --list     list the patches with their reasons

docs/recipes.md shows what the scripts do then.
"""

import dataclasses
import hashlib
import json
import os
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl import versions
from megatron_rl.errors import ExitCode, InputError, PlatformError, UsageError

# The folder `patches` has a folder for each upstream: its `tree.toml` says by which files the tree is recognized, and
# each patch is a NAME.diff with a NAME.toml.
#
# Git makes each change on a copy of one file, outside of any repository. On the tree itself it would patch the nearest
# of several places that fit, and follow the tree's core.autocrlf. It would write files in place, so that a kill leaves
# half of one. It would revert a patch even in a file that was edited since. Invariants:
#
# - A file is changed only if the old lines of every hunk stand in it exactly once.
# - Nothing is written unless everything fits.
# - A file changes by a rename, so that it is always either the old or the new one.
# - A receipt is in the tree before the first file changes, and until the last one is restored.
# - A file is restored, to its former bytes, only if it is as the patch left it.

FOLDER = Path(__file__).resolve().parents[2] / "patches"
RECEIPT = ".megatron_rl-patches.json"
_WAYS = ("--list", "--check", "--undo")


@dataclasses.dataclass(frozen=True)
class FilePatch:
    """A change to one file."""

    name: str
    diff: str
    file: str
    reason: str
    until: str
    """The event after which the patch can be dropped."""
    marker: str
    """A text that only a patched file has."""
    blobs: Mapping[str, Sequence[str]]
    """The tags of the releases that the patch was made for, by git's hash of their file."""


@dataclasses.dataclass(frozen=True)
class Upstream:
    """A known tree. It is recognized by its files, since forks copy version numbers too."""

    name: str
    has: Sequence[str]
    refused: str
    """The reason to give if the tree has no patches, or lacks an anchor."""
    anchors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Files, each with a text that only patchable versions have."""
    patches: Sequence[FilePatch] = ()


@dataclasses.dataclass(frozen=True)
class Change:
    """A file before and after its patch."""

    patch: FilePatch
    before: bytes
    after: bytes

    @property
    def tags(self) -> Sequence[str]:
        """Return the releases that have this file; none if another part of it was changed."""
        return self.patch.blobs.get(hash_blob(self.before), ())


def read_catalog(folder: Path = FOLDER) -> list[Upstream]:
    """Read all upstreams. A fork comes before the original tree, since it has the files of both."""
    if not folder.is_dir():
        raise InputError(f"{folder} must be a folder of patches: run megatron-rl from a clone, which holds it")
    upstreams = []
    for path in sorted(folder.glob("*/tree.toml")):
        patches = [
            FilePatch(diff.stem, diff.read_text(encoding="utf-8"), **_read_toml(diff.with_suffix(".toml")))
            for diff in sorted(path.parent.glob("*.diff"))
        ]
        upstreams.append(Upstream(**_read_toml(path), patches=patches))
    return sorted(upstreams, key=lambda upstream: bool(upstream.patches))


def find_upstream(tree: Path, catalog: Sequence[Upstream]) -> Upstream:
    """Recognize the tree; raise an InputError if it is unknown, or known and cannot be patched."""
    if not tree.is_dir():
        raise InputError(f"{tree} must be a folder: write that of a Megatron-LM tree")
    for upstream in catalog:
        if all((tree / path).exists() for path in upstream.has):
            missing = [path for path, text in upstream.anchors.items() if text.encode() not in _read(tree, path)]
            if missing or not upstream.patches:
                found = f" ({', '.join(missing)} comes from another version)" if missing else ""
                raise InputError(f"{tree} is {upstream.name}{found}: {upstream.refused}")
            return upstream
    names = ", ".join(sorted(upstream.name for upstream in catalog))
    raise InputError(f"{tree} must be one of the known trees ({names}): write the folder of one")


def plan(tree: Path, upstream: Upstream) -> list[Change]:
    """List the changes to make, none if all are applied.

    Raise an InputError if only some are, a text has moved, or a run would refuse the tree.
    """
    # A run with the tree reads the same file.
    version, needed = versions.read_megatron_version(tree / "megatron" / "core"), versions.MEGATRON_CORE
    if version is not None and not needed.accepts(version):
        raise InputError(
            f"{tree} has megatron-core {version}, and a run refuses all but {needed.wanted}: check out such a release"
        )
    changes, applied = [], []
    for patch in upstream.patches:
        content = _read(tree, patch.file)
        if b"\r" in content:
            raise InputError(f"{patch.file} has lines that end with CR: check the tree out with core.autocrlf=false")
        if patch.marker.encode() in content:
            before = _apply(patch, content, "--reverse")
            if before is None or patch.marker.encode() in before:
                raise InputError(
                    f"{patch.file} holds {patch.marker!r} and not all of the patch {patch.name}: take out what was "
                    "changed there by hand"
                )
            applied.append(patch.file)
        else:
            _check_places(patch, content)
            after = _apply(patch, content)
            if after is None:
                raise InputError(
                    f"{patch.file}: git apply refuses {patch.name}.diff; put back the diff of this version"
                )
            changes.append(Change(patch, content, after))
    if changes and applied:
        raise InputError(
            f"{tree} is half patched: {', '.join(applied)} is, {', '.join(change.patch.file for change in changes)} is "
            "not; revert the former by hand, or with --undo if there is a receipt"
        )
    return changes


def write(tree: Path, changes: Sequence[Change]) -> None:
    """Make the changes, the receipt first."""
    receipt = [
        {
            "file": change.patch.file,
            "patch": change.patch.name,
            "before": hash_blob(change.before),
            "after": hash_blob(change.after),
        }
        for change in changes
    ]
    files = {RECEIPT: (json.dumps(receipt, indent=2) + "\n").encode()}
    _replace(tree, files | {change.patch.file: change.after for change in changes})


def undo(tree: Path, upstream: Upstream) -> list[str]:
    """Restore the files that the receipt lists, and return them; raise an InputError if one is not as it was left."""
    if not (tree / RECEIPT).exists():
        raise InputError(f"{tree} has no {RECEIPT}: megatron-rl patch has changed nothing there")
    patches = {patch.name: patch for patch in upstream.patches}
    restored: dict[str, bytes] = {}
    try:
        receipt = list(json.loads((tree / RECEIPT).read_text(encoding="utf-8")))
    except ValueError:
        raise InputError(f"{tree / RECEIPT} cannot be read: remove it, and revert the patches by hand") from None
    for entry in receipt:
        content, patch = _read(tree, entry["file"]), patches.get(entry["patch"])
        if hash_blob(content) == entry["before"]:
            continue
        if hash_blob(content) != entry["after"] or patch is None:
            raise InputError(
                f"{entry['file']} was changed since it was patched: take your changes out, or remove "
                f"{tree / RECEIPT} and revert the patch {entry['patch']} by hand"
            )
        before = _apply(patch, content, "--reverse")
        if before is None or hash_blob(before) != entry["before"]:
            raise InputError(f"{entry['file']} cannot be restored: the patch {patch.name} was changed since")
        restored[entry["file"]] = before
    _replace(tree, restored)
    (tree / RECEIPT).unlink()
    return list(restored)


def hash_blob(content: bytes) -> str:
    """Compute git's hash of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _check_places(patch: FilePatch, content: bytes) -> None:
    """Raise an InputError unless the old lines of each hunk stand exactly once in the file."""
    lines = content.decode("utf-8", "replace").splitlines()
    hunks: list[list[str]] = []
    for line in patch.diff.splitlines():
        if line.startswith("@@"):
            hunks.append([])
        elif hunks and line[:1] in (" ", "-"):
            hunks[-1].append(line[1:])
    for number, old in enumerate(hunks, 1):
        count = sum(lines[place : place + len(old)] == old for place in range(len(lines)))
        if count != 1:
            first = next((line for line in old if line.strip()), "an empty line")
            raise InputError(
                f"{patch.file} has moved: the text of hunk {number}, which begins with {first!r}, "
                f"{'is missing' if not count else f'stands there {count} times'}; put the file back to the one that "
                "the patch is for, or make the change by hand"
            )


def _apply(patch: FilePatch, content: bytes, *options: str) -> bytes | None:
    """Let git apply the patch to a copy of its file; return None if git refuses."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / patch.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
        # A repository around the folder, or its user's configuration, would change what git does.
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "GIT_CEILING_DIRECTORIES": str(Path(scratch).parent),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        try:
            # Without --unidiff-zero a hunk without lines after its change fits at the end of the file alone.
            done = subprocess.run(
                ["git", "apply", "--unidiff-zero", *options],
                cwd=scratch,
                env=environment,
                input=patch.diff.encode(),
                capture_output=True,
            )
        except FileNotFoundError:
            raise PlatformError("git must be on PATH, since it applies the patches: install it") from None
        return None if done.returncode else copy.read_bytes()


def _replace(tree: Path, files: Mapping[str, bytes]) -> None:
    """Write all files beside their places, then rename them in this order."""
    staged: list[tuple[Path, Path]] = []
    try:
        # All that needs disk space or write permission is done before anything is changed.
        for file, content in files.items():
            staged.append((_write_beside(tree / file, content), tree / file))
        for temporary, place in staged:
            os.replace(temporary, place)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def _write_beside(place: Path, content: bytes) -> Path:
    if place.exists() and not os.access(place, os.W_OK):
        raise InputError(f"{place} is read-only: nothing was changed; make the tree writable")
    try:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        os.chmod(name, place.stat().st_mode & 0o777 if place.exists() else 0o644)
    except OSError as error:
        raise InputError(
            f"{place} cannot be written ({error.strerror}): nothing was changed; make room there"
        ) from None
    return Path(name)


def _read(tree: Path, file: str) -> bytes:
    try:
        return (tree / file).read_bytes()
    except OSError as error:
        raise InputError(
            f"{tree / file} cannot be read ({error.strerror}): the patch needs it, so take a complete tree"
        ) from None


def _read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def main(argv: Sequence[str]) -> int:
    """Patch a tree, or do what the flag says; every error leaves the tree as it was."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return ExitCode.OK if argv else ExitCode.USAGE
    tree, way = _parse(argv)
    upstream = find_upstream(tree, read_catalog())
    if way == "--list":
        print(_describe(upstream))
    elif way == "--undo":
        files = undo(tree, upstream)
        print("\n".join(f"{file} is what it was" for file in files) or "nothing to undo: every file was as it was")
    else:
        changes = plan(tree, upstream)
        for change in changes:
            release = ", ".join(change.tags) or "no release, and every place to change exists"
            print(f"{change.patch.file}: {'would be patched' if way else 'patched'}; it belongs to {release}")
        if not changes:
            print(f"{tree} is patched: nothing to do")
        elif not way:
            write(tree, changes)
            print(f"{tree / RECEIPT} lists the changes; megatron-rl patch {tree} --undo reverts them")
    return ExitCode.OK


def _parse(argv: Sequence[str]) -> tuple[Path, str]:
    ways = [word for word in argv if word.startswith("-")]
    folders = [word for word in argv if not word.startswith("-")]
    if unknown := [word for word in ways if word not in _WAYS]:
        raise UsageError(f"unknown flag {unknown[0]}: write one of {', '.join(_WAYS)}, or none")
    if len(ways) > 1 or len(folders) != 1:
        raise UsageError(f"write one folder, and at most one of {', '.join(_WAYS)}")
    return Path(folders[0]), "".join(ways)


def _describe(upstream: Upstream) -> str:
    return "\n\n".join(
        f"{patch.file} ({patch.name})\n  why    {patch.reason}\n  until  {patch.until}\n  for    "
        + ", ".join(tag for tags in patch.blobs.values() for tag in tags)
        for patch in upstream.patches
    )
