"""A full disk, a quota or a limit on the size of files ends a command by name."""

import errno
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.errors import ExitCode, NoRoom, find_no_room, room_checked
from megatron_rl.observe import run_folder
from megatron_rl.observe.metrics import MetricsFile
from megatron_rl.shared.protocol.wire import Prompt, encode_tokens
from megatron_rl.shared.records.append_file import AppendFailed
from megatron_rl.shared.weights import files
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar import starting
from megatron_rl.trainer.loop.entry import Entry
from megatron_rl.trainer.mcore.checkpoint import folders
from tests.processes import ROOT
from tests.unit.test_journal import files_of_at_most

FREE = r"\(\d+ bytes are free\)"


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (errno.ENOSPC, "make room there, then resume"),
        (errno.EDQUOT, "remove files that count towards the quota"),
        (errno.EFBIG, "raise the limit on the size of files (ulimit -f)"),
    ],
)
def test_an_error_for_want_of_room_names_the_file_what_is_free_and_the_way_out(tmp_path, code, way_out):
    found = find_no_room(OSError(code, os.strerror(code), str(tmp_path / "a" / "file")))
    assert found is not None
    assert found.exit_code == ExitCode.RUN == 5
    assert str(found).startswith(f"{tmp_path / 'a' / 'file'} cannot be written: {os.strerror(code)} (")
    assert f"bytes are free); {way_out}" in str(found)


def test_an_error_without_a_name_lists_the_places_where_the_file_may_be(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert str(find_no_room(full, tmp_path)).startswith(f"{tmp_path} cannot be written: No space left on device (")
    listed = str(find_no_room(full, tmp_path, Path("/dev/shm")))
    assert listed.startswith(f"a file in one of {tmp_path} (")
    assert "; /dev/shm (" in listed
    assert str(find_no_room(full)).startswith("a file cannot be written: No space left on device; make room")
    assert "left on device" in str(find_no_room("OSError: [Errno 28] No space left on device", tmp_path))


def test_other_errors_are_left_as_they_are():
    assert find_no_room(PermissionError(errno.EACCES, "Permission denied", "file")) is None
    assert find_no_room("a crash") is None
    with pytest.raises(ZeroDivisionError), room_checked():
        raise ZeroDivisionError


def test_an_error_that_a_full_disk_led_to_is_taken_for_it():
    def fail() -> None:
        try:
            fill(Path("/dev/full"))
        except OSError as error:
            raise RuntimeError("a library failed") from error

    with pytest.raises(NoRoom, match="No space left on device"), room_checked():
        fail()


def write_prompts(path: Path) -> None:
    starting.write_trials(path, [Prompt(index=0, row="row", tokens=encode_tokens([1] * 99))])


def write_config(path: Path) -> None:
    value = run_folder.Value(text="1" * 99, source="flag")
    run_folder.write_saved_config(path, run_folder.SavedConfig(sections={"run": {"value": value}}))


def write_weights(path: Path) -> None:
    files.create(path, files.FilePlan([TensorSpec("weight", (8, 8), "float32")]))


def write_nothing_but_the_tracker(path: Path) -> None:
    staged = folders.stage(path, 1)
    folders.put_in_place(staged, path, 1)


@pytest.mark.parametrize("write", [write_prompts, write_config, write_nothing_but_the_tracker])
def test_every_writer_of_a_file_names_it_when_a_real_write_finds_no_room(tmp_path, write: Callable[[Path], None]):
    with (
        files_of_at_most(0),
        pytest.raises(NoRoom, match=rf"^{tmp_path}/it.* cannot be written: File too large {FREE}"),
    ):
        write(tmp_path / "it")


def test_weights_that_take_more_than_is_free_are_refused_by_their_size(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: types.SimpleNamespace(free=7))
    with pytest.raises(NoRoom, match=rf"{tmp_path}/it cannot be written: the weights take \d+ bytes, 7 are free"):
        write_weights(tmp_path / "it")


@pytest.mark.parametrize("place", ["/dev/shm", None])
def test_files_have_all_their_room_before_anything_is_written(place):
    with tempfile.TemporaryDirectory(dir=place) as folder:
        files.create(Path(folder) / "it", files.FilePlan([TensorSpec("weight", (512, 512), "float32")]))
        status = (Path(folder) / "it" / "model.safetensors").stat()
    assert status.st_blocks * 512 >= status.st_size > 512 * 512 * 4


FILLED = """
    import pathlib, shutil, types
    from megatron_rl.errors import room_checked
    from megatron_rl.shared.weights import files
    from megatron_rl.shared.weights.mapping import TensorSpec
    # Another process takes the room after the look at what is free.
    shutil.disk_usage = lambda path: types.SimpleNamespace(free=1 << 40)
    plan = files.FilePlan([TensorSpec("weight", (1024, 1024), "float32")])
    with room_checked(pathlib.Path("it")):
        files.create(pathlib.Path("it"), plan)
        files.map_bytes(pathlib.Path("it/model.safetensors"), plan.num_bytes).fill_(1)
"""


MEMORY = "mount -t tmpfs -o size=1m none . && cd $PWD"
# Another kind of file system, whose room is that of the one below it.
DISK = (
    f"{MEMORY} && mkdir lower upper work disk && mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work "
    "none disk && cd disk"
)


@pytest.mark.parametrize("mounted", [MEMORY, DISK], ids=["memory", "disk"])
def test_weights_for_which_there_is_no_room_end_in_an_error_and_not_in_a_signal(mounted, tmp_path):
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("this user may not mount a folder")
    command = shlex.join([sys.executable, "-c", textwrap.dedent(FILLED)])
    script = f"{mounted} && PYTHONPATH={shlex.quote(str(ROOT))} exec {command}"
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "NoRoom: it cannot be written: No space left on device" in ended.stderr


def test_a_line_of_metrics_that_finds_no_room_says_what_is_free(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.write({"version": 0})
    with files_of_at_most(metrics.size), pytest.raises(AppendFailed, match=rf"cannot grow .*File too large {FREE}"):
        metrics.write({"version": 1})
    metrics.close()


def fill(path: Path) -> int:
    with path.open("w") as file:
        file.write("text")
    return 0


def test_a_rank_ends_by_name_when_its_disk_is_full(capsys):
    assert Entry("a rank").run(lambda entry: fill(Path("/dev/full"))) == ExitCode.RUN
    assert capsys.readouterr().err == (
        "a rank: a file cannot be written: No space left on device; make room there, then resume\n"
    )


def test_a_command_ends_by_name_when_its_disk_is_full(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_load", lambda command: lambda words: fill(Path("/dev/full")))
    assert cli.main(["report"]) == ExitCode.RUN
    assert capsys.readouterr().err.startswith("megatron-rl report: a file cannot be written: No space left on device")
