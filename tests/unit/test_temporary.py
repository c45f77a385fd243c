"""Folders for sockets and shared memory: short, private, and removed by the next start if their process was killed."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.sidecar.temporary import SOCKET_FOLDER_BYTES, make_folder, make_socket_folder
from megatron_rl.sidecar.vllm.server import ServerConfig, make_process_spec

ROOT = Path(__file__).parents[2]
LONG = 60


@pytest.fixture
def parent() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(params=[14, LONG])
def temporary(request: pytest.FixtureRequest, parent: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the temporary folder of this process, whose path has a number of bytes."""
    folder = parent / ("x" * max(1, request.param - len(str(parent)) - 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def start_maker(parent: Path) -> "tuple[subprocess.Popen[str], Path]":
    """Start a process that makes a folder and then waits; return it with the folder."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom megatron_rl.sidecar.temporary import make_folder\n"
        "print(make_folder('test-', Path(sys.argv[1])), flush=True)\ntime.sleep(600)"
    )
    words = [sys.executable, "-c", code, str(parent)]
    maker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert maker.stdout is not None
    return maker, Path(maker.stdout.readline().strip())


def test_sockets_have_short_paths_wherever_temporary_files_and_the_run_are(temporary, parent):
    folder = make_socket_folder()
    assert folder.parent == (temporary if len(str(temporary)) < LONG else Path("/tmp"))
    log = parent / ("y" * 200) / "engine-1023.log"
    spec = make_process_spec(ServerConfig(model="", max_model_len=8), "engine-1023", folder / "engine-1023", log)
    # As long as the names that vLLM gives its own sockets there.
    names = (spec.address, f"{spec.environment['VLLM_RPC_BASE_PATH']}/{'0' * 36}")
    for name in names:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
    assert all(len(os.fsencode(Path(name).parent)) <= SOCKET_FOLDER_BYTES for name in names)


def test_folders_are_private_and_are_not_where_a_log_out_removes_them(parent, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
    folder = make_socket_folder()
    assert not folder.is_relative_to(parent)
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.getuid(), 0o700)


def test_a_start_removes_what_killed_processes_have_left_and_nothing_else(parent):
    killed, left = start_maker(parent)
    running, used = start_maker(parent)
    with killed, running:
        (left / "weights").write_bytes(b"0" * 100)
        killed.kill()
        killed.wait()
        others = parent / "keep"
        others.mkdir()
        link = parent / left.name.replace(left.name[-8:], "linklink")
        link.symlink_to(others)
        assert left.exists()
        made = make_folder("test-", parent)
        assert sorted(parent.iterdir()) == sorted([used, others, link, made])
        running.kill()


def test_what_another_user_has_left_stays(parent, monkeypatch):
    killed, left = start_maker(parent)
    with killed:
        killed.kill()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    make_folder("test-", parent)
    assert left.exists()
