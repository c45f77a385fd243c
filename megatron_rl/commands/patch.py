"""`megatron-rl patch`: the smallest changes by which a tree's own scripts train with GRPO.

    megatron-rl patch TREE            check everything, then change it, and leave a receipt
    megatron-rl patch TREE --check    say what would be changed
    megatron-rl patch TREE --undo     take back what is still as it was left
    megatron-rl patch TREE --list     the patches, each with its reason, and when it can go

docs/recipes.md shows what the scripts do then.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.patching import tree as trees
from megatron_rl.patching.catalog import Upstream, read_catalog

_WAYS = ("--list", "--check", "--undo")


def main(argv: Sequence[str]) -> int:
    """Do what is asked for; every error leaves the tree as it was."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return ExitCode.OK if argv else ExitCode.USAGE
    tree, way = _read_words(argv)
    upstream = trees.find_upstream(tree, read_catalog())
    if way == "--list":
        print(_describe(upstream))
    elif way == "--undo":
        files = trees.undo(tree, upstream)
        print("\n".join(f"{file} is what it was" for file in files) or "nothing to undo: every file was as it was")
    else:
        changes = trees.plan(tree, upstream)
        for change in changes:
            of = ", ".join(change.tags) or "no release, and every place to change is there"
            print(f"{change.patch.file}: {'would be' if way else ''} patched; it is of {of}".replace("  ", " "))
        if not changes:
            print(f"{tree} is patched: nothing to do")
        elif not way:
            trees.write(tree, changes)
            print(f"{tree / trees.RECEIPT} says what was changed; megatron-rl patch {tree} --undo takes it back")
    return ExitCode.OK


def _read_words(argv: Sequence[str]) -> tuple[Path, str]:
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
