"""A run whose only engine is a vLLM on another host: it trains on proven groups, and leaves nothing there."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main as megatron_rl
from tests.e2e import loop
from tests.hosts.namespaces import network
from tests.hosts.worlds import Agent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PORT = 7100
ITERATIONS = 2


class RealAgent(Agent):
    """An agent that starts vLLM, and receives weights."""

    module = "megatron_rl.sidecar.agent"

    def start(self) -> None:
        words = [sys.executable, "-m", self.module, "--listen", self.address]
        words += ["--token-file", str(self.folder / "token"), "--folder", str(self.folder)]
        with (self.folder / "output").open("ab") as output:
            self.process = self._popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)


def test_a_run_trains_on_groups_of_an_engine_on_another_host_which_is_empty_afterwards(tmp_path, capsys):
    world = loop.make_world(tmp_path, head_dim=32)
    before = set(Path("/dev/shm").glob("megatron_rl-agent-*"))
    with network(1) as (host,):
        agent = RealAgent(tmp_path / "host", f"{host.address}:{PORT}", host.popen)
        agent.start()
        hosts = agent.folder / "hosts.toml"
        hosts.write_text(f'token_file = "token"\n[[host]]\naddress = "{agent.address}"\n')
        words = world.words(
            "run", train_iters=ITERATIONS, tensor_model_parallel_size=2, rollout_engine="vllm", rollout_num_engines=0,
            rollout_hosts=f"static:{hosts}", rollout_max_num_seqs=8,
        )  # fmt: skip
        try:
            agent.wait()
            loop.run(tmp_path / "outputs", 2, words, OMP_NUM_THREADS="1")
            received, sent = host.count_bytes()
            print(f"the host received {received} bytes and sent {sent}")
            assert agent.list_engine_processes() == []
        finally:
            agent.end()
            print(agent.output)
    assert set(Path("/dev/shm").glob("megatron_rl-agent-*")) == before
    assert megatron_rl(["audit", str(tmp_path / "runs" / "run")]) == 0
    assert f"{ITERATIONS} of {ITERATIONS} iterations complete, 0 breaches" in capsys.readouterr().out
