"""A whole sidecar with a real vLLM engine of two workers, seen by a stranger on the same host."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from megatron_rl.shared.protocol import wire
from tests.sidecar.sidecar_process import SidecarProcess, sidecar
from tests.sidecar.vllm_models import MAX_MODEL_LEN, draw_with_tokenizer, in_shared_memory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOBODY = 65534
PLAN = wire.Plan(num_prompts=4, group_size=2, num_replicas=1, micro_batch_size=2)


class Sidecar(NamedTuple):
    process: SidecarProcess
    address: tuple[str, int]
    sockets: list[str]
    """The sockets that its processes listen on, on this host."""
    lease: int
    submission: wire.Submission
    files: list[Path]
    """The files that no stranger may open: token, journal, audit log, weights, and the processes' shared memory."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """Start a sidecar and leave it in the middle of an iteration.

    Its folder lies where every user may look: its own mode has to protect it.
    """
    model = draw_with_tokenizer(tmp_path_factory.mktemp("model"))
    words = ("--hf-model", str(model), "--seq-length", str(MAX_MODEL_LEN), "--reward", "length:8", "--platform", "cpu")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder).chmod(0o755)
        run = Path(folder) / "run"
        process = stack.enter_context(sidecar(run, *words, "--rollout-tensor-parallel-size", "2"))
        weights = msgspec.structs.replace(stack.enter_context(in_shared_memory(model, 0)), run="run")
        with process.client() as client:
            lease = client.take_lease("run")
            client.publish(weights, 120)
            submitted = submission(weights.fingerprint)
            client.submit(submitted)
            assert client.slot(0, 0, 0, 120).parts
        host, port = (run / "address").read_text().strip().removeprefix("http://").split(":")
        files = [path for top in (run, Path(weights.folder)) for path in (top, *top.rglob("*"))]
        files += shared_memory(process)
        yield Sidecar(process, (host, int(port)), unix_sockets(process.tree()), lease, submitted, files)


def submission(fingerprint: str) -> wire.Submission:
    prompts = [wire.Prompt(index=i, row=str(i), tokens=wire.encode_tokens([i + 1, 2, 3])) for i in range(4)]
    return wire.Submission(
        run="run", version=0, fingerprint=fingerprint, plan=PLAN, prompts=prompts, deadline_seconds=300,
        sampling=wire.Sampling(max_tokens=8, ignore_eos=True),
    )  # fmt: skip


def shared_memory(process: SidecarProcess) -> list[Path]:
    maps = [line for member in process.tree() for line in Path(f"/proc/{member.pid}/maps").read_text().splitlines()]
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps if " /dev/shm/" in line and "(deleted)" not in line}
    return sorted(paths)


def unix_sockets(members: list[psutil.Process]) -> list[str]:
    """Return the names of all sockets of these processes that have one.

    Those of Linux's abstract names begin with @.
    """
    held = set()
    for member in members:
        for path in Path(f"/proc/{member.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                held.add(os.readlink(path))
    lines = [line.split(maxsplit=7) for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({fields[7] for fields in lines if len(fields) > 7 and f"socket:[{fields[6]}]" in held})


def test_the_whole_process_tree_listens_at_the_services_address_and_in_private_folders_only(running: Sidecar) -> None:
    members = running.process.tree()
    titles = [" ".join(member.cmdline()) for member in members]
    assert sum(title.startswith("VLLM::Worker") for title in titles) == 2
    open_sockets = [(member.pid, c) for member in members for c in member.net_connections("inet")]
    # A datagram socket that is bound hears any sender.
    heard = [(pid, c.laddr, c.type) for pid, c in open_sockets if not c.raddr and c.laddr]
    print(f"{len(members)} processes, {len(heard)} listening on a network, {len(running.sockets)} unix sockets")
    assert heard == [(running.process.process.pid, running.address, socket.SOCK_STREAM)]
    assert len(running.sockets) >= 2
    for name in running.sockets:
        folder = Path(name).parent
        assert name.startswith("/"), name
        assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid()), name


def test_no_process_carries_the_token_where_others_see_it(running: Sidecar) -> None:
    token = (running.process.folder / "token").read_text().strip()
    for member in running.process.tree():
        assert token not in " ".join(member.cmdline())
        assert token not in str(member.environ())


# A stranger's attempts, as a program that has all it needs before it becomes a stranger.
ATTEMPTS = """
    import fcntl, json, os, socket, struct, sys

    asked = json.loads(sys.stdin.read())

    def tried(action):
        try:
            return action() or "done"
        except OSError as error:
            return type(error).__name__

    def connect(family, address):
        with socket.socket(family, socket.SOCK_STREAM) as attempt:
            attempt.settimeout(5)
            attempt.connect(address)

    def ask(address):
        with socket.socket() as attempt:
            attempt.settimeout(5)
            attempt.connect(address)
            attempt.sendall(b"GET /v1/status HTTP/1.1\\r\\nHost: sidecar\\r\\nConnection: close\\r\\n\\r\\n")
            return attempt.recv(1000).split()[1].decode()

    def read(path):
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)

    def write(path):
        os.close(os.open(os.path.join(path, "stranger") if os.path.isdir(path) else path, os.O_WRONLY | os.O_CREAT))

    if asked.get("raise_loopback"):
        with socket.socket() as control:
            fcntl.ioctl(control, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))
    if "user" in asked:
        os.setgroups([])
        os.setresgid(*[asked["user"]] * 3)
        os.setresuid(*[asked["user"]] * 3)
    print(json.dumps({
        "service": tried(lambda: ask(tuple(asked["address"]))),
        "sockets": [tried(lambda: connect(socket.AF_UNIX, path)) for path in asked.get("sockets", [])],
        "files": [tried(lambda: read(path)) for path in asked.get("files", [])],
        "writes": [tried(lambda: write(path)) for path in asked.get("writes", [])],
    }))
"""


def attempts(*prefix: str, **asked: Any) -> dict[str, Any]:
    """Return the attempts that succeed in a process of their own."""
    ended = subprocess.run(
        [*prefix, sys.executable, "-c", textwrap.dedent(ATTEMPTS)],
        input=json.dumps(asked), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_from_another_network_namespace_the_service_is_out_of_reach(running: Sidecar) -> None:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel lets this user make no network namespace")
    assert attempts(address=running.address)["service"] == "401"
    assert attempts("unshare", "--net", address=running.address, raise_loopback=True)["service"] == (
        "ConnectionRefusedError"
    )


def test_at_the_hosts_other_addresses_the_service_does_not_answer(running: Sidecar) -> None:
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    others = [address for address in addresses if not address.startswith("127.")]
    if not others:
        pytest.skip("this host has no address but loopback")
    for address in others:
        assert attempts(address=(address, running.address[1]))["service"] == "ConnectionRefusedError"


def test_another_user_can_neither_read_nor_write_nor_reach_a_sidecar(running: Sidecar) -> None:
    if os.getuid() != 0:
        pytest.skip("this user is not root, who can become another user")
    ours = [str(path) for path in running.files]
    secret = [*ours, *(f"/proc/{m.pid}/{name}" for m in running.process.tree() for name in ("environ", "fd"))]
    assert any(path.endswith("/token") for path in secret)
    assert any("/journal/" in path for path in secret)
    assert any(path.endswith(".safetensors") for path in secret)
    assert any(path.startswith("/dev/shm/psm_") for path in secret)
    asked = {"address": running.address, "sockets": running.sockets, "files": secret}
    owner = attempts(**asked)
    assert set(owner["files"]) == {"done"}
    assert "done" in owner["sockets"]
    theirs = attempts(**asked, writes=ours, user=NOBODY)
    print(f"user {NOBODY} tried {len(secret)} files to read, {len(ours)} to write, {len(running.sockets)} sockets")
    assert theirs["service"] == "401"
    for what in ("sockets", "files", "writes"):
        assert set(theirs[what]) == {"PermissionError"}, what


def test_a_sidecar_killed_in_mid_generation_leaves_no_process_and_no_shared_memory(running: Sidecar) -> None:
    """Run last: this ends the sidecar of all tests here."""
    with running.process.client() as client:
        client.use_lease(running.lease)
        client.refuse(0, wire.Mismatch(mean=1.0, largest=1.0, bound=0.1))
        long = msgspec.structs.replace(running.submission, sampling=wire.Sampling(max_tokens=400, ignore_eos=True))
        client.submit(long)
        deadline = time.monotonic() + 60
        while not client.status()["engines"]["engines"]["engine-0"]["in_flight"]:
            assert time.monotonic() < deadline
    members, names = running.process.tree(), set(os.listdir("/dev/shm"))
    theirs = {path.name for path in shared_memory(running.process)} & names
    assert theirs
    running.process.kill()
    killed = time.monotonic()
    assert not psutil.wait_procs(members, timeout=60)[1]
    print(f"{len(members)} processes gone {time.monotonic() - killed:.1f} s after the sidecar")
    while theirs & set(os.listdir("/dev/shm")):
        assert time.monotonic() < killed + 60, theirs & set(os.listdir("/dev/shm"))
        time.sleep(0.05)
