"""Patching a tree and taking it back.

Invariants:
- nothing is written unless everything fits;
- a file changes by a rename, so that it is always either the old or the new one;
- a receipt lies in the tree before the first file changes, and until the last one is restored;
- a file is restored, to its former bytes, only if it is as the patch left it.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.patching import diff
from megatron_rl.patching.catalog import FilePatch, Upstream

RECEIPT = ".megatron_rl-patches.json"


@dataclasses.dataclass(frozen=True)
class Change:
    """A file before and after; git's hashes of both are in the receipt."""

    patch: FilePatch
    before: bytes
    after: bytes

    @property
    def tags(self) -> tuple[str, ...]:
        """The releases that have this file; none if somebody has changed another part of it."""
        return self.patch.blobs.get(hash_blob(self.before), ())


def hash_blob(content: bytes) -> str:
    """Compute git's hash of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def find_upstream(tree: Path, catalog: Sequence[Upstream]) -> Upstream:
    """Recognize the tree; raise an InputError if it is unknown, or known and cannot be patched."""
    if not tree.is_dir():
        raise InputError(f"{tree} must be a folder: write that of a Megatron-LM tree")
    for upstream in catalog:
        if all((tree / path).exists() for path in upstream.has):
            missing = [path for path, text in upstream.anchors.items() if text not in _read_text(tree / path)]
            if missing or not upstream.patches:
                found = f" ({', '.join(missing)} is of another version)" if missing else ""
                raise InputError(f"{tree} is {upstream.name}{found}: {upstream.refused}")
            return upstream
    names = ", ".join(sorted(upstream.name for upstream in catalog))
    raise InputError(f"{tree} is none of the trees that are known ({names}): write the folder of one of them")


def plan(tree: Path, upstream: Upstream) -> list[Change]:
    """List the changes to make, none if all are applied; raise an InputError if only some are, or a text has moved."""
    changes, applied = [], []
    for patch in upstream.patches:
        content = _read(tree / patch.file)
        text = _decode(content, patch.file)
        if patch.marker in text:
            if not diff.fits(text, diff.reverse(patch.hunks)):
                raise InputError(
                    f"{patch.file} holds {patch.marker!r} and not all of the patch {patch.name}: take back what was "
                    "changed there by hand"
                )
            applied.append(patch.file)
        else:
            changes.append(Change(patch, content, diff.apply(text, patch.hunks, patch.file).encode()))
    if changes and applied:
        raise InputError(
            f"{tree} is half patched: {', '.join(applied)} is, {', '.join(change.patch.file for change in changes)} is "
            "not; take back the one by hand, or with --undo if there is a receipt"
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
    with _staged() as stage:
        # All that needs disk space or write permission is done before anything is changed.
        for change in changes:
            stage(tree / change.patch.file, change.after)
        _put(tree / RECEIPT, (json.dumps(receipt, indent=2) + "\n").encode())


def undo(tree: Path, upstream: Upstream) -> list[str]:
    """Take back what the receipt lists, and return the files; raise an InputError if one is not as it was left."""
    if not (tree / RECEIPT).exists():
        raise InputError(f"{tree} has no {RECEIPT}: megatron-rl patch has changed nothing there")
    patches = {patch.name: patch for patch in upstream.patches}
    back: list[tuple[str, bytes]] = []
    for entry in _read_receipt(tree):
        content = _read(tree / entry["file"])
        found = hash_blob(content)
        if found == entry["before"]:
            continue
        if found != entry["after"] or entry["patch"] not in patches:
            raise InputError(
                f"{entry['file']} was changed since it was patched: take your changes out, or remove "
                f"{tree / RECEIPT} and take the patch {entry['patch']} back by hand"
            )
        hunks = diff.reverse(patches[entry["patch"]].hunks)
        before = diff.apply(_decode(content, entry["file"]), hunks, entry["file"]).encode()
        if hash_blob(before) != entry["before"]:
            raise InputError(f"{entry['file']} does not become what it was: the patch {entry['patch']} is another now")
        back.append((entry["file"], before))
    with _staged() as stage:
        for file, before in back:
            stage(tree / file, before)
    (tree / RECEIPT).unlink()
    return [file for file, _ in back]


def _read_receipt(tree: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads((tree / RECEIPT).read_text(encoding="utf-8")))
    except ValueError:
        raise InputError(f"{tree / RECEIPT} cannot be read: remove it, and take the patches back by hand") from None


@contextlib.contextmanager
def _staged() -> Iterator[Any]:
    """Within this context write files beside their places; rename them at the end, unless something fails before."""
    staged: list[tuple[Path, Path]] = []

    def stage(place: Path, content: bytes) -> None:
        staged.append((_write_beside(place, content), place))

    try:
        yield stage
        for temporary, place in staged:
            os.replace(temporary, place)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def _put(place: Path, content: bytes) -> None:
    os.replace(_write_beside(place, content), place)


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


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): the tree lacks a file that is patched") from None


def _read_text(path: Path) -> str:
    return _read(path).decode("utf-8", "replace")


def _decode(content: bytes, name: str) -> str:
    if b"\r" in content:
        raise InputError(f"{name} has lines that end with CR: check the tree out with core.autocrlf=false")
    return content.decode("utf-8")
