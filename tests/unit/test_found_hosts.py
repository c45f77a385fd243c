"""Hosts that a scheduler has started: found by their names, described by one table, waited for."""

import asyncio
import contextlib
import dataclasses
import re
from pathlib import Path

import pytest

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.hosts import kinds
from megatron_rl.sidecar.hosts.kinds import AgentsMissing, find_hosts, find_problems
from megatron_rl.sidecar.hosts.static import HostPlace
from tests.hosts.listeners import answering, find_free_address

TEXT = """
token_file = "token"
[every_host]
port = 7300
engines = 2
devices = [0, 1]
python = "/opt/vllm/bin/python"
"""
PODS = '[kubernetes]\nstateful_set = "maths-engines"\nservice = "maths"\nreplicas = 2\n'
SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node[3-4]" || { echo "no such list" >&2; exit 1; }
printf 'node3\\nnode4\\n'
"""


def write(folder: Path, text: str) -> Path:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef\n")
    path = folder / "hosts.toml"
    path.write_text(text)
    return path


def give_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "scontrol"
    program.write_text(SCONTROL)
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def find_without_waiting(monkeypatch: pytest.MonkeyPatch, value: str) -> tuple[HostPlace, ...]:
    return find_source(monkeypatch, value).read().hosts


def find_source(monkeypatch: pytest.MonkeyPatch, value: str) -> kinds.FoundHosts:
    async def skip(*_: object) -> None: ...

    monkeypatch.setattr(kinds, "_await_agents", skip)
    return asyncio.run(find_hosts(value, 1, 1.0, contextlib.AsyncExitStack()))


def test_the_hosts_of_a_het_job_are_those_of_its_second_component_and_alike(tmp_path, monkeypatch):
    give_scontrol(tmp_path, monkeypatch)
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_0", "node[1-2]")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "node[3-4]")
    monkeypatch.setenv(kinds.VARIABLE, str(write(tmp_path, TEXT)))
    alike = HostPlace("", 2, (0, 1), "/opt/vllm/bin/python")
    found = find_without_waiting(monkeypatch, "slurm")
    assert found == tuple(dataclasses.replace(alike, address=f"{name}:7300") for name in ("node3", "node4"))


def test_a_sidecar_outside_of_a_het_job_says_what_is_missing(tmp_path, monkeypatch):
    path = write(tmp_path, TEXT)
    for group in (0, 1):
        monkeypatch.delenv(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", raising=False)
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST_HET_GROUP_1 is not set: start the run in a het-job"):
        find_without_waiting(monkeypatch, f"slurm:{path}")
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "node[5-6]")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="scontrol, .* is not found"):
        find_without_waiting(monkeypatch, f"slurm:{path}")
    give_scontrol(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=re.escape("the hosts in node[5-6]: no such list")):
        find_without_waiting(monkeypatch, f"slurm:{path}")


def test_the_hosts_of_kubernetes_are_pods_by_names_that_they_keep(tmp_path, monkeypatch):
    found = find_without_waiting(monkeypatch, f"kubernetes:{write(tmp_path, TEXT + PODS)}")
    assert [place.address for place in found] == ["maths-engines-0.maths:7300", "maths-engines-1.maths:7300"]


def test_hosts_in_a_row_run_an_engine_together(tmp_path, monkeypatch):
    text = TEXT.replace("devices = [0, 1]", "hosts_per_engine = 2\ndevices = [0, 1, 2, 3]") + PODS

    def find(replicas: int, size: int) -> list[str]:
        monkeypatch.setattr(kinds, "_await_agents", skip)
        value = f"kubernetes:{write(tmp_path, text.replace('replicas = 2', f'replicas = {replicas}'))}"
        found = asyncio.run(find_hosts(value, size, 1.0, contextlib.AsyncExitStack()))
        return [place.together for place in found.read().hosts]

    async def skip(*_: object) -> None: ...

    assert find(4, 4) == ["engines-0", "engines-0", "engines-1", "engines-1"]
    with pytest.raises(UsageError, match="hosts_per_engine = 2 must divide the number of hosts, 3"):
        find(3, 4)
    with pytest.raises(UsageError, match="hosts_per_engine = 2 must divide --rollout-tensor-parallel-size 3"):
        find(4, 3)
    with pytest.raises(UsageError, match=re.escape("devices = [0, 1, 2, 3] must name 2")):
        find(4, 2)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("kubernetes", TEXT + PODS, TEXT + PODS.replace("replicas = 2", "replicas = 3")),
        ("static", "token_file = 'token'\n[[host]]\naddress = 'a:1'\n[[host]]\naddress = 'b:1'",
         "token_file = 'token'\n" + "".join(f"[[host]]\naddress = '{name}:1'\n" for name in "abc")),
    ],
)  # fmt: skip
def test_a_file_that_changes_is_followed(tmp_path, monkeypatch, kind, first, second):
    found = find_source(monkeypatch, f"{kind}:{write(tmp_path, first)}")
    assert len(found.read().hosts) == 2
    write(tmp_path, second)
    assert len(found.read().hosts) == 3
    write(tmp_path, "[[host")
    with pytest.raises(UsageError, match="cannot be read"):
        found.read()


def test_all_mistakes_of_a_file_about_found_hosts_are_named_at_once(tmp_path, monkeypatch):
    text = """
        token_file = "none"
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
    """
    expected = [
        "token_file: ", "unknown key 'every_hosts' (the nearest is every_host)",
        "[every_host]: port = 65535 must be a port of at most 65534", "[every_host]: address must not be given",
        "[every_host]: devices = [0] must name 2", "[kubernetes]: unknown key 'serice' (the nearest is service)",
        "[kubernetes]: stateful_set = '' must be a name", "[kubernetes]: service is missing",
        "[kubernetes]: replicas = 0 must be a number",
    ]  # fmt: skip
    found = list(find_problems(f"kubernetes:{write(tmp_path, text)}", 1))
    assert len(found) == len(expected), found
    for problem, words in zip(found, expected, strict=True):
        assert words in problem
    monkeypatch.delenv(kinds.VARIABLE, raising=False)
    (problem,) = find_problems("slurm", 1)
    assert f"{kinds.VARIABLE} is not set: start the run by megatron-rl launch slurm" in problem
    (problem,) = find_problems("slum:x", 1)
    assert "must be one of static:FILE, slurm[:FILE], kubernetes[:FILE], ray[:FILE] (the nearest is slurm)" in problem


def test_ray_is_asked_for_if_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda _: None)
    (problem,) = find_problems(f"ray:{write(tmp_path, TEXT + '[ray]' + chr(10) + 'hosts = 2')}", 1)
    assert "ray is not installed: pip install 'megatron-rl[ray]'" in problem


def test_agents_are_waited_for_and_those_that_are_missing_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "_PAUSE_SECONDS", 0.01)
    here = find_free_address()
    port = here.rpartition(":")[2]

    async def wait(port: str, names: list[str], seconds: float) -> list[str]:
        monkeypatch.setattr(kinds._Kubernetes, "list_names", lambda _: names)
        path = write(tmp_path, TEXT.replace("7300", port) + PODS)
        found = await find_hosts(f"kubernetes:{path}", 1, seconds, contextlib.AsyncExitStack())
        return [place.address for place in found.read().hosts]

    async def check() -> None:
        waiting = asyncio.create_task(wait(port, ["127.0.0.1"], 60.0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        async with answering(here):
            assert await waiting == [here]
            with pytest.raises(AgentsMissing, match=f"1 of 2 agents do not answer.*nowhere.invalid:{port}") as raised:
                await wait(port, ["127.0.0.1", "nowhere.invalid"], 0.0)
            assert here not in str(raised.value)
        async with answering(here, "503 Service Unavailable"):
            with pytest.raises(AgentsMissing, match="it answers 503"):
                await wait(port, ["127.0.0.1"], 0.0)

    asyncio.run(check())
