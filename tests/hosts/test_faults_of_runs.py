"""Faults in whole runs over hosts that share no folder: each is survived, the audit log is whole, and nothing is left.

| fault | what must follow | test |
| --- | --- | --- |
| the only host with engines is killed in mid-iteration | groups wait; it gets the version again | here |
| its agent then has another token | the log names it, and groups wait on | here |
| its clock is ten minutes ahead | nothing | here |
| a host is 20 times slower | the iteration takes longer | here |
| the host of trainer and service is killed | engines end after 30 s; the same command resumes | here |
| one of two trainer hosts is killed | torchrun starts again with the other, from the checkpoint | here |
| an agent is killed, also in a publish | test_agents.py, test_faults_of_hosts.py |
| a link is cut for 5 and for 60 seconds | test_faults_of_hosts.py, test_delivery.py |
| bytes of weights arrive changed | tests/unit/test_delivery.py |
| frames are repeated and overtake each other | test_delivery.py |
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main as megatron_rl
from megatron_rl.errors import InputError
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.shared.protocol.client import RolloutClient, RolloutError, read_token
from tests.e2e import loop
from tests.hosts.namespaces import INSIDE, Host, network
from tests.hosts.real_agents import RealAgent
from tests.hosts.worlds import TOKEN, write_hosts
from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVICE_PORT, MASTER_PORT = 8700, 29500
SOON = 240.0
ITERATIONS = 6


def make_words(hosts: Sequence[Host], agent: RealAgent, **changes: Any) -> list[str]:
    """Write the files of a small run on all hosts; return the run's words."""
    first = hosts[0]
    write_hosts(first.folder, [agent])
    loop.make_world(first.folder, head_dim=32)
    for host in hosts[1:]:
        shutil.copytree(first.folder, host.folder, dirs_exist_ok=True)
    world = loop.World(INSIDE, INSIDE / "model", INSIDE / "prompts.jsonl", f"{INSIDE / 'reward.py'}:parity")
    return world.words(
        "run", train_iters=ITERATIONS, rollout_engine="vllm", rollout_num_engines=0, rollout_max_num_seqs=8,
        rollout_hosts=f"static:{INSIDE / 'hosts.toml'}", rollout_listen=f"{first.address}:{SERVICE_PORT}",
        save_interval=1, **changes,
    )  # fmt: skip


def launch(host: Host, program: list[str], words: list[str], **environment: str) -> "subprocess.Popen[bytes]":
    with (host.folder / "output").open("ab") as output:
        return host.popen(
            [sys.executable, *program, str(ROOT / "pretrain_grpo.py"), *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **environment},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def await_(condition: Callable[[], object], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < end
        time.sleep(0.02)


def count_iterations(host: Host) -> int:
    with contextlib.suppress(InputError):
        return len(read_metrics(host.folder / "runs" / "run"))
    return 0


def ask(host: Host) -> Mapping[str, Any]:
    """Return the state of the service, or nothing if it does not answer."""
    with contextlib.suppress(OSError, RolloutError):
        token = read_token(host.folder / "runs" / "run" / "token")
        with RolloutClient(f"http://{host.address}:{SERVICE_PORT}", token, 2.0) as client:
            return client.status()
    return {}


def is_sampling(host: Host) -> bool:
    return any(engine["in_flight"] for engine in ask(host).get("engines", {}).get("engines", {}).values())


@contextlib.contextmanager
def shown(*hosts: Host) -> Iterator[None]:
    """Show the output of hosts at the end."""
    try:
        yield
    finally:
        for host in hosts:
            for path in (host.folder / "output", host.folder / "runs/run/sidecar.log", host.folder / "agent/output"):
                if path.exists():
                    print(f"--- {path}\n{path.read_text()[-8000:]}")


def check_end(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatron_rl(["audit", str(host.folder / "runs" / "run")]) == 0
    # The iteration in which the run was killed began twice.
    assert re.search(rf"\b{ITERATIONS} of \d+ iterations complete, 0 breaches", capsys.readouterr().out)


def test_a_run_survives_the_loss_of_its_only_host_with_engines_and_resumes_after_that_of_its_service(tmp_path, capsys):
    with network(2, tmp_path) as (first, second), shown(first, second):
        agent = RealAgent(second)
        agent.start()
        agent.wait()
        words = make_words((first, second), agent, save=INSIDE / "save", load=INSIDE / "save")
        process = launch(first, [], words)
        await_(lambda: count_iterations(first) >= 1 and is_sampling(first), process)
        version = ask(first)["version"]
        second.kill()
        # A system that starts again has nothing in memory.
        second.restart()
        (agent.folder / "token").write_text("another token that is long")
        agent.start()
        name = agent.address
        await_(lambda: "the token is wrong" in str(ask(first).get("hosts", {}).get(name, {}).get("error")), process)
        agent.end()
        (agent.folder / "token").write_text(TOKEN)
        agent.turn_clock()
        agent.start()
        await_(lambda: any(engine["state"] == "ready" for engine in ask(first)["engines"]["engines"].values()), process)
        # The iteration that lost its only engine continues.
        assert ask(first)["version"] == version
        seen = count_iterations(first)
        second.shape("tbf rate 2mbit burst 32kbit latency 1s")
        await_(lambda: count_iterations(first) > seen, process)
        second.shape("")
        seen = count_iterations(first)
        await_(lambda: count_iterations(first) > seen and is_sampling(first), process)
        assert agent.list_engine_processes()
        first.kill()
        process.wait()
        agent.await_no_engines(SOON)
        first.restart()
        resumed = launch(first, [], words)
        assert resumed.wait(SOON) == 0
        agent.end()
        for host in (first, second):
            assert host.list_processes() == []
            assert host.list_files("/dev/shm") == []
        check_end(first, capsys)


def test_a_run_that_loses_a_trainer_host_continues_on_the_other_from_its_checkpoint(tmp_path, capsys):
    # A folder that hosts share, as checkpoints need it.
    save = Path(tempfile.mkdtemp(prefix="megatron-rl-test-", dir="/var/tmp"))
    try:
        with network(3, tmp_path) as (first, second, third), shown(first, second, third):
            agent = RealAgent(third)
            agent.start()
            agent.wait()
            words = make_words((first, second, third), agent, save=save, load=save)
            processes = []
            for host in (first, second):
                elastic = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
                elastic += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:{MASTER_PORT}"]
                elastic += ["--rdzv-conf", "last_call_timeout=10", "--local-addr", host.address, "--max-restarts", "3"]
                processes.append(launch(host, elastic, words))
            await_(lambda: count_iterations(first) >= 2 and is_sampling(first), processes[0])
            second.kill()
            processes[1].wait()
            assert processes[0].wait(SOON) == 0
            agent.end()
            output = (first.folder / "output").read_text()
            assert "on 2 ranks of cpu" in output
            assert "the run continues from" in output
            assert "on 1 rank of cpu" in output.partition("the run continues from")[0].partition("(rank 1)")[2]
            check_end(first, capsys)
    finally:
        shutil.rmtree(save)
