"""The contract of all kinds of --rollout-hosts: which hosts a FILE names, all mistakes at once, and changes of FILE."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from megatron_rl.config.settings import RewardConfig
from megatron_rl.confined.confinement import landlock_version
from megatron_rl.errors import UsageError
from megatron_rl.rewards.pool import build_pool_settings
from megatron_rl.rewards.types import RewardError
from megatron_rl.sidecar.hosts import (
    KINDS,
    VARIABLE,
    HostList,
    HostPlace,
    build_source,
    find_host_problems,
    find_secrets,
    ray_cluster,
    sources,
)
from megatron_rl.sidecar.hosts.sources import AgentsMissing
from megatron_rl.sidecar.settings import parse
from tests.hosts.worlds import find_free_address
from tests.reward_pools import request, score

TOKEN = "0123456789abcdef"
EVERY = '[every_host]\nport = 7300\nengines = 2\ndevices = [0, 1]\npython = "/opt/vllm/bin/python"\n'
PODS = '[kubernetes]\nstateful_set = "maths-engines"\nservice = "maths"\nreplicas = 2\n'
LISTED = "".join(
    f'[[host]]\naddress = "{name}:7300"\n{EVERY.partition("7300")[2]}model = "/data"\n' for name in ("a", "[fd00::3]")
)
SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node[3-4]" || { echo "no such list" >&2; exit 1; }
printf 'node3\\nnode4\\n'
"""
FILES = {
    "static": (LISTED, ("a", "[fd00::3]")),
    "slurm": (EVERY, ("node3", "node4")),
    "kubernetes": (EVERY + PODS, ("maths-engines-0.maths", "maths-engines-1.maths")),
    "ray": (EVERY + "[ray]\nhosts = 2\n", ("10.0.0.1", "10.0.0.2")),
}
"""The FILE of each kind, and the names of the hosts that it leads to."""


def write(folder: Path, text: str, mode: int = 0o600, kind: str = "static") -> str:
    """Write a FILE, and the file of its token; return the value of the flag."""
    token = folder / "token"
    token.touch(mode=mode)
    token.write_text(f"{TOKEN}\n")
    path = folder / "hosts.toml"
    path.write_text(text if "token_file" in text else f'token_file = "token"\n{text}')
    return f"{kind}:{path}"


def put_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "scontrol"
    program.write_text(SCONTROL)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.fixture
def schedulers(tmp_path, monkeypatch):
    """Stand in for what the kinds ask outside of the process: scontrol, a Ray cluster and agents that answer."""

    class Cluster:
        addresses = [f"{name}:7300" for name in FILES["ray"][1]]

        def __init__(self, *_: object) -> None: ...

        @contextlib.asynccontextmanager
        async def opened(self, seconds: float) -> AsyncIterator[None]:
            yield

    async def answer_at_once(*_: object) -> None: ...

    put_scontrol(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "node[1-2]")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "node[3-4]")
    monkeypatch.setattr(ray_cluster, "RayCluster", Cluster)
    monkeypatch.setattr(ray_cluster.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(sources, "await_agents", answer_at_once)


def open_source(value: str, size: int = 1) -> Callable[[], HostList]:
    async def enter() -> Callable[[], HostList]:
        return await contextlib.AsyncExitStack().enter_async_context(build_source(value, size).opened(1.0))

    return asyncio.run(enter())


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_leads_to_hosts_as_it_describes_them_and_to_their_token(kind, tmp_path, monkeypatch, schedulers):
    text, names = FILES[kind]
    value = write(tmp_path, text, kind=kind)
    alike = HostPlace("", 2, (0, 1), "/opt/vllm/bin/python", "/data" if kind == "static" else "")
    expected = tuple(dataclasses.replace(alike, address=f"{name}:7300") for name in names)
    assert open_source(value)() == HostList(expected, TOKEN)
    assert find_secrets(value) == ((tmp_path / "token").resolve(),)
    assert find_secrets(None) == ()
    if kind != "static":
        monkeypatch.setenv(VARIABLE, str(tmp_path / "hosts.toml"))
        assert open_source(kind)() == HostList(expected, TOKEN)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_with_a_token_a_key_or_the_file_itself_is_named(kind, tmp_path, schedulers):
    text, _ = FILES[kind]
    for wrong, words in (
        (f"token_file = 'none'\n{text}", "token_file: .*No such file"),
        (f"tls_ca = 'none'\n{text}", "tls_ca .* cannot be used"),
        (f"tls_ca = 3\n{text}", "tls_ca must be the path"),
        (f"tls_c = 3\n{text}", "unknown key 'tls_c'.*the nearest is tls_ca"),
        ("[[host", "cannot be read"),
        (text.replace("[0, 1]", "[0, 0]"), "devices = .0, 0. must name 2 different ones"),
        (text.replace("engines = 2", "engine = 2"), "unknown key 'engine' .the nearest is engines"),
    ):
        problems = list(find_host_problems(write(tmp_path, wrong, kind=kind), 1))
        assert any(re.search(words, problem) for problem in problems), (wrong, problems)
    (tmp_path / "hosts.toml").write_text(text)
    assert any("token_file is missing" in problem for problem in find_host_problems(f"{kind}:{tmp_path}/hosts.toml", 1))
    write(tmp_path, text)
    (tmp_path / "token").chmod(0o644)
    assert any("token_file: " in problem for problem in find_host_problems(f"{kind}:{tmp_path}/hosts.toml", 1))


@pytest.mark.parametrize(
    ("kind", "more"),
    [("kubernetes", PODS.replace("replicas = 2", "replicas = 3")), ("static", "[[host]]\naddress = 'c:1'\n")],
)
def test_a_file_that_changes_is_followed(kind, more, tmp_path, schedulers):
    text = FILES[kind][0]
    read = open_source(write(tmp_path, text, kind=kind))
    assert len(read().hosts) == 2
    write(tmp_path, EVERY + more if kind == "kubernetes" else text + more)
    assert len(read().hosts) == 3
    write(tmp_path, "[[host")
    with pytest.raises(UsageError, match="cannot be read"):
        read()


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (
            "static",
            """
            hots = 1
            [[host]]
            address = "10.0.0.2"
            engine = 2
            [[host]]
            address = "10.0.0.3:7100"
            engines = 0
            [[host]]
            address = "10.0.0.3:7100"
            engines = 2
            devices = [0, 0]
            python = 3
            """,
            [
                "token_file: ", "unknown key 'hots' (the nearest is host)",
                "host 1 (10.0.0.2): unknown key 'engine' (the nearest is engines)",
                "host 1 (10.0.0.2): address must be HOST:PORT", "host 2 (10.0.0.3:7100): engines = 0 must be",
                "host 3 (10.0.0.3:7100): python must be",
                "host 3 (10.0.0.3:7100): devices = [0, 0] must name 2 different ones",
                "host 3 (10.0.0.3:7100) is named twice",
            ],
        ),
        (
            "kubernetes",
            """
            [every_hosts]
            [every_host]
            port = 65535
            address = "a:1"
            devices = [0]
            engines = 2
            [kubernetes]
            stateful_set = ""
            replicas = 0
            serice = "maths"
            """,
            [
                "token_file: ", "unknown key 'every_hosts' (the nearest is every_host)",
                "[every_host]: port = 65535 must be a port of at most 65534",
                "[every_host]: address must not be given", "[every_host]: devices = [0] must name 2",
                "[kubernetes]: unknown key 'serice' (the nearest is service)",
                "[kubernetes]: stateful_set = '' must be a name", "[kubernetes]: service is missing",
                "[kubernetes]: replicas = 0 must be a number",
            ],
        ),
        ("static", "", ["no host is named"]),
        ("static", "host = 3", ["no host is named"]),
        ("static", "[[host]]\naddress = ['a:1']", ["address must be HOST:PORT"]),
    ],
)  # fmt: skip
def test_all_mistakes_of_a_file_are_named_at_once(kind, text, expected, tmp_path):
    problems = list(find_host_problems(write(tmp_path, text, 0o644 if len(expected) > 1 else 0o600, kind), 1))
    assert len(problems) == len(expected), problems
    for problem, words in zip(problems, expected, strict=True):
        assert words in problem


def test_a_value_that_names_no_kind_or_no_file_and_a_package_that_is_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    (problem,) = find_host_problems("slurm", 1)
    assert f"{VARIABLE} is not set: start the run by megatron-rl launch slurm" in problem
    (problem,) = find_host_problems("slum:x", 1)
    assert "must be one of static:FILE, slurm[:FILE], kubernetes[:FILE], ray[:FILE] (the nearest is slurm)" in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (problem,) = find_host_problems(write(tmp_path, FILES["ray"][0], kind="ray"), 1)
    assert "ray is not installed: pip install 'megatron-rl[ray]'" in problem


def test_a_sidecar_outside_of_a_het_job_says_what_is_missing(tmp_path, monkeypatch):
    value = write(tmp_path, EVERY, kind="slurm")
    for group in (0, 1):
        monkeypatch.delenv(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", raising=False)
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST_HET_GROUP_1 is not set: start the run in a het-job"):
        open_source(value)
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "node[5-6]")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="scontrol, .* is not found"):
        open_source(value)
    put_scontrol(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=re.escape("the hosts in node[5-6]: no such list")):
        open_source(value)


def test_hosts_in_a_row_run_an_engine_together(tmp_path, schedulers):
    every = EVERY.replace("devices = [0, 1]", "hosts_per_engine = 2\ndevices = [0, 1, 2, 3]")

    def find(replicas: int, size: int) -> list[str]:
        pods = PODS.replace("replicas = 2", f"replicas = {replicas}")
        return [place.together for place in open_source(write(tmp_path, every + pods, kind="kubernetes"), size)().hosts]

    assert find(4, 4) == ["engines-0", "engines-0", "engines-1", "engines-1"]
    with pytest.raises(UsageError, match="hosts_per_engine = 2 must divide the number of hosts, 3"):
        find(3, 4)
    with pytest.raises(UsageError, match="hosts_per_engine = 2 must divide --rollout-tensor-parallel-size 3"):
        find(4, 3)
    with pytest.raises(UsageError, match=re.escape("devices = [0, 1, 2, 3] must name 2")):
        find(4, 2)


@contextlib.asynccontextmanager
async def answering(address: str, status: str = "200 OK") -> AsyncIterator[None]:
    """Answer every request with a status."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health ")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    host, port = address.split(":")
    async with await asyncio.start_server(answer, host, int(port)):
        yield


def test_agents_are_waited_for_and_those_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_PAUSE_SECONDS", 0.01)
    here = find_free_address()
    port = here.rpartition(":")[2]
    value = write(tmp_path, EVERY.replace("7300", port) + PODS, kind="kubernetes")

    async def wait(names: list[str], seconds: float) -> list[str]:
        monkeypatch.setattr(sources.KubernetesHosts, "list_names", lambda _: names)
        async with build_source(value, 1).opened(seconds) as read:
            return [place.address for place in read().hosts]

    async def check() -> None:
        waiting = asyncio.create_task(wait(["127.0.0.1"], 60.0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        async with answering(here):
            assert await waiting == [here]
            with pytest.raises(AgentsMissing, match=f"1 of 2 agents do not answer.*nowhere.invalid:{port}") as raised:
                await wait(["127.0.0.1", "nowhere.invalid"], 0.0)
            assert here not in str(raised.value)
        async with answering(here, "503 Service Unavailable"):
            with pytest.raises(AgentsMissing, match="it answers 503"):
                await wait(["127.0.0.1"], 0.0)

    asyncio.run(check())


def test_a_sidecar_without_any_engine_and_hosts_without_vllm_are_refused(tmp_path):
    words = ["--rollout-folder", str(tmp_path), "--rollout-engine", "scripted", "--rollout-num-engines", "0"]
    with pytest.raises(UsageError, match="must be at least 1 without"):
        parse(words)
    with pytest.raises(UsageError, match="is for --rollout-engine vllm") as raised:
        parse([*words, "--rollout-hosts", write(tmp_path, LISTED)])
    assert "must be at least 1 without" not in str(raised.value)
    with pytest.raises(UsageError, match="must be one of static:FILE"):
        parse([*words, "--rollout-hosts", "somewhere"])


def test_a_function_next_to_the_file_of_hosts_does_not_read_the_token(tmp_path):
    if landlock_version() < 1:
        pytest.skip("files are hidden by Landlock")
    value = write(tmp_path, LISTED)
    file = tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\n"
        "def fn(completions, **columns):\n"
        "    return [float(len(Path(__file__).with_name('token').read_text()))] * len(completions)\n"
    )
    settings = build_pool_settings(RewardConfig(), tmp_path / "run", find_secrets(value))
    (result,) = score([f"{file}:fn"], request(), private=settings.private)
    assert isinstance(result, RewardError), result
    assert "PermissionError" in str(result)
