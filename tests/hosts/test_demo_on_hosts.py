"""The demo on two and on four hosts with files of their own: it learns, its audit log is whole, and nothing is left.

Trainer ranks are on two hosts, and started by torchrun. Engines are vLLM.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.arithmetic import demo, task, warm_up
from megatron_rl.cli import main as megatron_rl
from megatron_rl.observe.metrics import read_metrics
from tests.hosts.namespaces import INSIDE, Host, network
from tests.hosts.real_agents import RealAgent
from tests.hosts.worlds import Agent, running, write_hosts
from tests.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

MASTER_PORT, SERVICE_PORT = 29500, 8700
ITERATIONS = 12
REQUESTS_SHARE = 0.1
"""The bytes of requests for groups, of beats and of acknowledgements, over those of this tiny model's weights."""
FILES = ("model", "train.jsonl", "held_out.jsonl")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo's tasks and its model after the warm-up."""
    folder = tmp_path_factory.mktemp("start")
    task.write_files(folder, 0)
    warm_up.make(folder / "model", 0, warm_up.Recipe())
    return folder


def train(hosts: Sequence[Host], agents: Sequence[Agent], start: Path, layout: str) -> list[int]:
    """Train with a rank on each of the first two hosts; return the exit codes of torchrun."""
    first, started, outputs = hosts[0], [], []
    for host in hosts:
        for name in FILES:
            copy = shutil.copytree if (start / name).is_dir() else shutil.copy
            copy(start / name, host.folder / name)
    write_hosts(first.folder, agents)
    flags: dict[str, Any] = {
        "train_iters": ITERATIONS, "eval_interval": ITERATIONS, "rollout_num_engines": 0,
        "hf_model": INSIDE / "model", "prompts": INSIDE / "train.jsonl", "eval_prompts": INSIDE / "held_out.jsonl",
        "reward": f"{ROOT / 'examples' / 'arithmetic' / 'reward.py'}:right_answer", "reward_workers": 1,
        "rollout_folder": INSIDE / "run", "rollout_hosts": f"static:{INSIDE / 'hosts.toml'}",
        "rollout_listen": f"{first.address}:{SERVICE_PORT}",
    }  # fmt: skip
    words = [*demo.FLAGS, *demo.LAYOUTS[layout]]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    for rank, host in enumerate(hosts[:2]):
        outputs.append(host.folder / "output")
        launch = ["--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr", first.address]
        launch += ["--master-port", str(MASTER_PORT), str(ROOT / "pretrain_grpo.py")]
        with outputs[-1].open("wb") as output:
            started.append(
                host.popen(
                    [sys.executable, "-m", "torch.distributed.run", *launch, *words],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(600) for process in started]
    finally:
        for process in started:
            process.terminate()
        for path in outputs:
            print(path.read_text()[-6000:])
    return codes


def check_links(hosts: Sequence[Host], start: Path, run: Path) -> None:
    """Check what the kernel counts on links of hosts with engines alone: each version once, and little beside it."""
    weights = sum(path.stat().st_size for path in (start / "model").glob("*.safetensors"))
    versions = len(read_metrics(run))
    for host in hosts[2:]:
        received, _ = host.count_bytes()
        share = received / (versions * weights)
        print(f"{host.address} received {share:.3f} times the weights of {versions} versions")
        assert 1 < share < 1.05 + REQUESTS_SHARE


@pytest.mark.parametrize(("count", "layout"), [(2, "tp2"), (4, "dp2")])
def test_the_demo_learns_on_hosts_that_share_no_folder(count, layout, start, tmp_path, capsys):
    with network(count, tmp_path) as hosts:
        agents = [RealAgent(host) for host in hosts[-2:]]
        with running(agents):
            assert train(hosts, agents, start, layout) == [0, 0]
            assert [agent.list_engine_processes() for agent in agents] == [[], []]
        for host in hosts:
            assert host.list_processes() == []
            assert host.list_files("/dev/shm") == []
        run = hosts[0].folder / "run"
        if count > 2:
            with capsys.disabled():
                check_links(hosts, start, run)
    first, *_, last = read_metrics(run)
    assert last["evaluation"]["pass"] > first["evaluation"]["pass"] + 0.3
    assert megatron_rl(["audit", str(run)]) == 0
    assert f"{ITERATIONS} of {ITERATIONS} iterations complete, 0 breaches" in capsys.readouterr().out
