"""`megatron-rl patch`: the smallest changes by which a tree's own scripts train with GRPO.

    megatron-rl patch TREE            change the files, and leave a receipt
    megatron-rl patch TREE --check    list the changes
    megatron-rl patch TREE --undo     restore the files
    megatron-rl patch TREE --list     list the patches with their reasons

docs/recipes.md shows what the scripts do then.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.commands import patched_tree
from megatron_rl.commands.patched_tree import Upstream, read_catalog
from megatron_rl.errors import ExitCode, UsageError

_WAYS = ("--list", "--check", "--undo")


def main(argv: Sequence[str]) -> int:
    """Patch a tree, or do what the flag says; every error leaves the tree as it was."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return ExitCode.OK if argv else ExitCode.USAGE
    tree, way = _parse(argv)
    upstream = patched_tree.find_upstream(tree, read_catalog())
    if way == "--list":
        print(_describe(upstream))
    elif way == "--undo":
        files = patched_tree.undo(tree, upstream)
        print("\n".join(f"{file} is what it was" for file in files) or "nothing to undo: every file was as it was")
    else:
        changes = patched_tree.plan(tree, upstream)
        for change in changes:
            release = ", ".join(change.tags) or "no release, and every place to change exists"
            print(f"{change.patch.file}: {'would be patched' if way else 'patched'}; it belongs to {release}")
        if not changes:
            print(f"{tree} is patched: nothing to do")
        elif not way:
            patched_tree.write(tree, changes)
            print(f"{tree / patched_tree.RECEIPT} lists the changes; megatron-rl patch {tree} --undo reverts them")
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
