"""Patching other projects' trees: synthetic ones, and Megatron-LM's own if MEGATRON_LM names a clone of it."""

import ast
import dataclasses
import os
import stat
import subprocess
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.commands import patched_tree
from megatron_rl.commands.patched_tree import FilePatch, Upstream
from megatron_rl.errors import ExitCode, InputError, PlatformError

CLONE = os.environ.get("MEGATRON_LM")
DIFF = """--- a/run.sh
+++ b/run.sh
@@ -1,3 +1,4 @@
 first
-second
+second \\
+    more
 third
@@ -9,2 +10,2 @@
 eighth
-last
\\ No newline at end of file
+LAST
\\ No newline at end of file
"""
BEFORE = "first\nsecond\nthird\n\nfourth\neighth\nlast"
AFTER = "first\nsecond \\\n    more\nthird\n\nfourth\neighth\nLAST"
SCRIPT = '"""A script."""\n\n# a comment\nimport time\n'


def make_patch(name: str, file: str, text: str, marker: str) -> FilePatch:
    known = {patched_tree.hash_blob(BEFORE.encode()): ("v1",)}
    return FilePatch(name, text, file, "because", "never", marker, known)


ADDED = '--- a/run.py\n+++ b/run.py\n@@ -1,3 +1,4 @@\n """A script."""\n \n+import added\n # a comment\n'
UPSTREAM = Upstream(
    "a tree",
    ("core.py",),
    "take another one",
    {"core.py": "new"},
    (make_patch("shell", "run.sh", DIFF, "more"), make_patch("script", "run.py", ADDED, "import added")),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    (folder / "core.py").write_text("new")
    (folder / "run.sh").write_text(BEFORE)
    (folder / "run.sh").chmod(0o755)
    (folder / "run.py").write_text(SCRIPT)
    return folder


def patch(tree: Path) -> int:
    changes = patched_tree.plan(tree, patched_tree.find_upstream(tree, [UPSTREAM]))
    if changes:
        patched_tree.write(tree, changes)
    return len(changes)


def snapshot(tree: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) for path in tree.iterdir()}


def test_a_patched_tree_is_taken_back_byte_for_byte_and_mode_for_mode(tree: Path) -> None:
    before = snapshot(tree)
    assert patch(tree) == 2
    assert (tree / "run.sh").read_text() == AFTER
    assert (tree / "run.py").read_text() == SCRIPT.replace("# a", "import added\n# a")
    assert stat.S_IMODE((tree / "run.sh").stat().st_mode) == 0o755
    assert patched_tree.undo(tree, UPSTREAM) == ["run.sh", "run.py"]
    assert snapshot(tree) == before


def test_patching_a_second_time_changes_nothing(tree: Path) -> None:
    patch(tree)
    before = snapshot(tree)
    assert patch(tree) == 0
    assert snapshot(tree) == before


def test_a_file_that_was_changed_elsewhere_is_patched_and_counts_as_no_release(tree: Path) -> None:
    assert [change.tags for change in patched_tree.plan(tree, UPSTREAM)] == [("v1",), ()]
    (tree / "run.sh").write_text(BEFORE.replace("fourth", "fourth\nfifth"))
    assert [change.tags for change in patched_tree.plan(tree, UPSTREAM)] == [(), ()]
    assert patch(tree) == 2


def refused(tree: Path, message: str, is_undoing: bool = False) -> None:
    """Check that the patch is refused, and that the tree is as it was, to the last file."""
    before = snapshot(tree)
    with pytest.raises(InputError, match=message):
        patched_tree.undo(tree, UPSTREAM) if is_undoing else patch(tree)
    assert snapshot(tree) == before


def test_a_tree_that_has_moved_is_refused_with_file_and_hunk(tree: Path) -> None:
    (tree / "run.py").write_text(SCRIPT.replace("# a comment", "# another"))
    refused(tree, 'run.py has moved: the text of hunk 1, which begins with \'"""A script."""\', is missing')
    (tree / "run.py").write_text(SCRIPT + SCRIPT)
    refused(tree, "run.py has moved: the text of hunk 1, .* stands there 2 times")
    (tree / "run.py").write_text(SCRIPT)
    (tree / "run.sh").write_text(BEFORE.replace("eighth", "ninth"))
    refused(tree, "run.sh has moved: the text of hunk 2, which begins with 'eighth', is missing")


def test_lines_that_end_with_cr_are_refused(tree: Path) -> None:
    (tree / "run.py").write_bytes(SCRIPT.replace("\n", "\r\n").encode())
    refused(tree, "run.py has lines that end with CR: check the tree out with core.autocrlf=false")


def test_a_read_only_tree_is_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may write to every file, so the system's answer is replaced.
    stock = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("run.py") and stock(path, mode))
    refused(tree, "run.py is read-only: nothing was changed; make the tree writable")


def test_a_half_patched_tree_is_refused_and_its_receipt_takes_it_back(tree: Path) -> None:
    before = snapshot(tree)
    patch(tree)
    (tree / "run.py").write_text(SCRIPT)
    refused(tree, r"is half patched: run.sh is, run.py is not; revert the former by hand, or with --undo")
    assert patched_tree.undo(tree, UPSTREAM) == ["run.sh"]
    assert snapshot(tree) == before


def test_a_part_of_a_patch_is_refused(tree: Path) -> None:
    (tree / "run.sh").write_text(AFTER.replace("LAST", "last"))
    refused(tree, "run.sh holds 'more' and not all of the patch shell")


def test_a_file_that_holds_a_patched_text_twice_is_refused(tree: Path) -> None:
    patch(tree)
    (tree / "run.py").write_text(2 * (tree / "run.py").read_text())
    refused(tree, "run.py holds 'import added' and not all of the patch script")


def test_a_damaged_diff_is_refused(tree: Path) -> None:
    damaged = dataclasses.replace(UPSTREAM.patches[0], diff=DIFF.replace("-1,3 +1,4", "-1,3 +1,5"))
    before = snapshot(tree)
    with pytest.raises(InputError, match="run.sh: git apply refuses shell.diff"):
        patched_tree.plan(tree, dataclasses.replace(UPSTREAM, patches=(damaged,)))
    assert snapshot(tree) == before


def test_neither_configuration_nor_a_repository_around_changes_what_git_does(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "config").write_text("[core]\nautocrlf = true\n[apply]\nwhitespace = error-all\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nothing"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    assert patch(tree) == 2
    assert (tree / "run.sh").read_bytes() == AFTER.encode()


def test_a_tree_is_left_alone_without_git(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(tree)
    monkeypatch.setenv("PATH", str(tree))
    with pytest.raises(PlatformError, match="git must be on PATH"):
        patch(tree)
    assert snapshot(tree) == before


def test_a_file_that_was_changed_since_is_not_taken_back(tree: Path) -> None:
    patch(tree)
    (tree / "run.py").write_text((tree / "run.py").read_text() + "print()\n")
    refused(tree, "run.py was changed since it was patched: take your changes out, or remove .*by hand", True)


def test_nothing_is_taken_back_without_a_receipt(tree: Path) -> None:
    refused(tree, "has no .megatron_rl-patches.json: megatron-rl patch has changed nothing there", True)


def test_a_failure_while_files_change_places_leaves_a_receipt_that_takes_all_back(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, stock = snapshot(tree), os.replace

    def fail_at_the_script(source: Path, place: Path) -> None:
        if Path(place).name == "run.py":
            raise OSError("killed")
        stock(source, place)

    monkeypatch.setattr(os, "replace", fail_at_the_script)
    with pytest.raises(OSError, match="killed"):
        patch(tree)
    monkeypatch.undo()
    assert (tree / "run.sh").read_text() == AFTER
    assert (tree / "run.py").read_text() == SCRIPT
    patched_tree.undo(tree, UPSTREAM)
    assert snapshot(tree) == before


def test_a_tree_is_known_by_its_files(tree: Path, tmp_path: Path) -> None:
    (tree / "core.py").write_text("old")
    refused(tree, r"is a tree \(core.py comes from another version\): take another one")
    (tree / "core.py").unlink()
    refused(tree, r"must be one of the known trees \(a tree\)")
    with pytest.raises(InputError, match="must be a folder"):
        patched_tree.find_upstream(tmp_path / "nothing", [UPSTREAM])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("mindspeed_llm/x", "pretrain_gpt.py"), "MindSpeed-LLM: .*0.12.1, and megatron_rl needs 0.16 to 0.19"),
        (("megatron_patch/x", "toolkits/x"), "Pai-Megatron-Patch: .*0.14 and 0.15, and megatron_rl needs 0.16 to 0.19"),
        (("Dockerfile_rocm.ci", "megatron/core/x"), "ROCm's Megatron-LM: .*0.10, and megatron_rl needs 0.16 to 0.19"),
        (
            ("pretrain_gpt.py", "megatron/training/training.py", "megatron/core/transformer/transformer_config.py"),
            "Megatron-LM .*training.py comes from another version.*: its core is below 0.16",
        ),
    ],
)
def test_a_fork_with_an_older_core_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, ...], message: str
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(InputError, match=message):
        patched_tree.find_upstream(tmp_path, patched_tree.read_catalog())
    assert cli.main(["patch", str(tmp_path)]) == ExitCode.INPUT
    assert "megatron-rl patch: " in capsys.readouterr().err


def test_every_patch_says_why_until_when_and_for_which_files() -> None:
    patches = [patch for upstream in patched_tree.read_catalog() for patch in upstream.patches]
    assert {patch.name for patch in patches} == {"pretrain_gpt", "mixtral", "gpt3", "llama"}
    for one in patches:
        assert one.reason
        assert one.until
        assert all(len(blob) == 40 and tags for blob, tags in one.blobs.items())
        hunks = one.diff.split("\n@@")[1:]
        assert hunks
        for hunk in hunks:
            of_marker = [line for line in hunk.splitlines()[1:] if one.marker in line]
            assert of_marker
            assert all(line.startswith("+") for line in of_marker)


def test_the_command_checks_patches_and_takes_back(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_rl.commands.patched_tree.read_catalog", lambda: [UPSTREAM])
    before = snapshot(tree)
    assert cli.main(["patch", str(tree), "--check"]) == ExitCode.OK
    assert "run.sh: would be patched; it belongs to v1\nrun.py: would be patched; it belongs to no release" in said(
        capsys
    )
    assert snapshot(tree) == before
    assert cli.main(["patch", str(tree), "--list"]) == ExitCode.OK
    assert "run.sh (shell)\n  why    because\n  until  never\n  for    v1" in said(capsys)
    assert cli.main(["patch", str(tree)]) == ExitCode.OK
    assert "run.sh: patched; it belongs to v1" in said(capsys)
    assert cli.main(["patch", str(tree)]) == ExitCode.OK
    assert "is patched: nothing to do" in said(capsys)
    assert cli.main(["patch", str(tree), "--undo"]) == ExitCode.OK
    assert "run.sh is what it was\nrun.py is what it was" in said(capsys)
    assert snapshot(tree) == before


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize(("minor", "is_refused"), [(15, True), (16, False), (19, False), (20, True)])
def test_a_tree_whose_version_a_run_refuses_is_not_patched_and_can_still_be_taken_back(
    tree: Path, minor: int, is_refused: bool
) -> None:
    core = tree / "megatron" / "core"
    core.mkdir(parents=True)
    patch(tree)
    (core / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\nPRE_RELEASE = 'rc0'\n")
    upstream = patched_tree.find_upstream(tree, [UPSTREAM])
    assert patched_tree.undo(tree, upstream) == ["run.sh", "run.py"]
    if is_refused:
        with pytest.raises(
            InputError, match=rf"has megatron-core 0\.{minor}\.0rc0, and a run refuses all but >=0.16,<0.20"
        ):
            patched_tree.plan(tree, upstream)
    else:
        assert len(patched_tree.plan(tree, upstream)) == 2


@pytest.mark.parametrize("words", [["--list"], ["x", "--list", "--undo"], ["x", "y"], ["x", "--revert"]])
def test_a_command_line_without_one_tree_or_with_two_wishes_is_refused(words: list[str]) -> None:
    assert cli.main(["patch", *words]) == ExitCode.USAGE


def show(tag: str, file: str) -> bytes:
    return subprocess.run(["git", "-C", str(CLONE), "show", f"{tag}:{file}"], check=True, capture_output=True).stdout


@pytest.mark.skipif(CLONE is None, reason="make test-clones MEGATRON_LM=CLONE runs it")
def test_each_patch_applies_to_each_release_it_names_and_is_taken_back(tmp_path: Path) -> None:
    upstream = next(one for one in patched_tree.read_catalog() if one.patches)
    tags = {tag for patch in upstream.patches for of_blob in patch.blobs.values() for tag in of_blob}
    assert len(tags) >= 7
    for tag in sorted(tags):
        folder = tmp_path / tag
        files = {*upstream.has, *upstream.anchors, *(patch.file for patch in upstream.patches)}
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(show(tag, file))
        assert patched_tree.find_upstream(folder, patched_tree.read_catalog()) == upstream
        changes = patched_tree.plan(folder, upstream)
        assert [tag in change.tags for change in changes] == [True] * 4
        patched_tree.write(folder, changes)
        ast.parse((folder / "pretrain_gpt.py").read_text())
        for patch in upstream.patches:
            if patch.file.endswith(".sh"):
                subprocess.run(["bash", "-n", str(folder / patch.file)], check=True)
        assert patched_tree.plan(folder, upstream) == []
        patched_tree.undo(folder, upstream)
        assert all((folder / file).read_bytes() == show(tag, file) for file in files)


@pytest.mark.skipif(CLONE is None, reason="make test-clones MEGATRON_LM=CLONE runs it")
def test_a_release_before_the_first_that_runs_here_is_refused(tmp_path: Path) -> None:
    upstream = next(one for one in patched_tree.read_catalog() if one.patches)
    for file in upstream.has:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(show("core_v0.15.3", file))
    with pytest.raises(InputError, match="its core is below 0.16"):
        patched_tree.find_upstream(tmp_path, patched_tree.read_catalog())
