"""A run whose only engine is one vLLM over two hosts: each loads its part, and no part outlives another."""

import threading
import time
from pathlib import Path

import pytest

from megatron_rl.cli import main as megatron_rl
from tests.e2e import loop
from tests.hosts.namespaces import network
from tests.hosts.real_agents import RealAgent
from tests.hosts.worlds import running, write_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ITERATIONS = 3


def test_an_engine_over_two_hosts_trains_a_run_and_starts_again_after_one_part_was_killed(tmp_path, capsys):
    world = loop.make_world(tmp_path, head_dim=32)
    folder = tmp_path / "runs" / "run"
    before = set(Path("/dev/shm").glob("megatron_rl-agent-*"))
    with network(2) as hosts:
        agents = [RealAgent(host, tmp_path / f"host-{number}") for number, host in enumerate(hosts)]
        named = write_hosts(tmp_path, agents, 'together = "both"')
        words = world.words(
            "run", train_iters=ITERATIONS, rollout_engine="vllm", rollout_num_engines=0, rollout_max_num_seqs=8,
            rollout_hosts=f"static:{named}", rollout_tensor_parallel_size=2,
        )  # fmt: skip
        killing = threading.Thread(target=kill_a_worker, args=(agents[1], folder / "metrics.jsonl"))
        with running(agents):
            killing.start()
            loop.run(tmp_path / "outputs", 1, words, seconds=900, OMP_NUM_THREADS="1")
            killing.join()
            for agent in agents:
                assert agent.list_engine_processes() == []
    assert set(Path("/dev/shm").glob("megatron_rl-agent-*")) == before
    assert megatron_rl(["audit", str(folder)]) == 0
    assert f"{ITERATIONS} of {ITERATIONS} iterations complete, 0 breaches" in capsys.readouterr().out
    assert f"its part on host {agents[1].address}" in (folder / "sidecar.log").read_text()


def kill_a_worker(agent: RealAgent, metrics: Path) -> None:
    """Kill the worker of a host's part once an iteration is over."""
    deadline = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    next(process for process in agent.list_engine_processes() if "Worker" in process.cmdline()[0]).kill()
